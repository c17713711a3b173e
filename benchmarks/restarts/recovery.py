"""How long a training needs after kill -9 of a rank, in parts, on one host and on three.

    python benchmarks/restarts/recovery.py

The three hosts are namespaces of this machine (tests/harness/hosts.py; needs root). Each part ends
when the last rank is through. The medians of the repeats are printed, and the spread of the sums.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import itertools

from tests.harness.hosts import Hosts, lives, missing

LIMIT = 300.0  # seconds, far above what a start takes
# What ends each part, in order.
PARTS = {
    "notice": "all old ranks are gone",
    "sweep": "hvdrun restarts the job",
    "start": "Python runs the script",
    "import": "TensorFlow, Keras and hvd_keras are imported",
    "MPI": "hvd.init() returns",
    "model": "the script has built the model and the data",
    "restore": "fit has begun, and the checkpoint is assigned",
    "data": "the iterator over the data exists",
    "trace": "the first step is done",
}


def child(folder: str) -> None:
    """One rank: writes down when each part ended, and trains until it is killed."""
    marks = {"start": time.time(), "pid": os.getpid()}
    import keras
    import numpy as np

    import hvd_keras as hvd

    marks["import"] = time.time()
    hvd.init()
    marks["MPI"] = time.time()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(4):
        model.add(keras.layers.Dense(256, activation="relu"))
    model.add(keras.layers.Dense(10))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    x = np.random.default_rng(0).normal(size=(100_000, 64)).astype("float32")
    data = hvd.data.shard((x, x[:, :10]), batch_size=32)
    marks["model"] = time.time()
    checkpoint = hvd.callbacks.Checkpoint(f"{folder}/checkpoints", save_freq=20)
    steps = 0

    class Mark(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            marks.setdefault("restore", time.time())

        def on_train_batch_begin(self, batch, logs=None):
            marks.setdefault("data", time.time())

        def on_train_batch_end(self, batch, logs=None):
            nonlocal steps
            if not logs:  # a batch that is passed over
                return
            steps += 1
            time.sleep(0.01)
            if steps == 1:
                marks["trace"] = time.time()
            if steps == 50:  # two checkpoints are there
                path = Path(folder, f"{marks['pid']}.part")
                path.write_text(json.dumps(marks))
                path.rename(path.with_suffix(f".{hvd.rank()}"))

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=1000, verbose=0, callbacks=[broadcast, checkpoint, Mark()])


def wait_for_ranks(folder: Path, ranks: int, hvdrun: subprocess.Popen) -> list[dict]:
    """Returns the marks of all ranks of the start in progress, and removes them."""
    limit = time.monotonic() + LIMIT
    while len(found := sorted(folder.glob("*.[0-9]"))) < ranks:
        if hvdrun.poll() is not None or time.monotonic() > limit:
            raise SystemExit(f"no {ranks} ranks: {(folder / 'output').read_text()[-3000:]}")
        time.sleep(0.02)
    found.sort(key=lambda path: path.suffix)
    marks = [json.loads(path.read_text()) for path in found]
    for path in found:
        path.unlink()
    return marks


def numbers_out_here(folder: Path) -> list[int]:
    """The ranks' processes; those of a host have other numbers within it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if words[-2:] == [b"--child", os.fsencode(folder)] and words[1].endswith(b".py"):
                found.append(int(entry.name))
    return found


def ready_servers() -> int:
    """The servers that have the ranks' imports, see hvd_keras/launch/onhost/fork_server.py."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += (entry / "cmdline").read_bytes().startswith(b"hvdrun: has imported")
    return found


def recoveries(folder: Path, hosts: Hosts | None, ranks: int, repeats: int) -> Iterator[dict]:
    """Kills a rank again and again; yields the time of each part in seconds."""
    where = ["-H", ",".join(f"{host.name}:1" for host in hosts)] if hosts else ["--oversubscribe"]
    command = [sys.executable, "-m", "hvd_keras.hvdrun", "-np", str(ranks), *where]
    command += ["--max-restarts", "100", sys.executable, __file__, "--child", str(folder)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    output = folder / "output"
    with output.open("wb") as file:
        start = hosts[0].start if hosts else subprocess.Popen
        hvdrun = start(command, env=environment, stdout=file, stderr=file)
    try:
        wait_for_ranks(folder, ranks, hvdrun)
        while ready_servers() < (len(hosts) if hosts else 1):
            time.sleep(0.1)
        for number in range(1, repeats + 1):
            old = numbers_out_here(folder)
            assert len(old) == ranks, old
            times = {"": time.time()}
            os.kill(old[-1], signal.SIGKILL)
            while any(map(lives, old)):
                time.sleep(0.002)
            times["notice"] = time.time()
            while f"hvdrun: restart {number} of".encode() not in output.read_bytes():
                time.sleep(0.005)
            times["sweep"] = time.time()
            marks = wait_for_ranks(folder, ranks, hvdrun)
            for part in list(PARTS)[2:]:
                times[part] = max(one[part] for one in marks)
            ends = list(times.values())
            yield dict(zip(PARTS, (b - a for a, b in itertools.pairwise(ends)), strict=True))
    finally:
        if hosts:
            hosts[0].signal(hvdrun, signal.SIGTERM)
        else:
            hvdrun.send_signal(signal.SIGTERM)
        hvdrun.wait(timeout=LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    columns = {}
    with tempfile.TemporaryDirectory() as name:
        found = list(recoveries(Path(name), None, 2, options.repeats))
        columns["2 ranks on one host"] = found
    if reason := missing():
        print(f"recovery: not on three hosts: {reason}", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory() as name, Hosts(3) as hosts:
            found = list(recoveries(Path(name), hosts, 3, options.repeats))
            columns["3 ranks on three hosts"] = found
    print(f"| part | ends when | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for part, end in PARTS.items():
        medians = (statistics.median(one[part] for one in found) for found in columns.values())
        print(f"| {part} | {end} | {' | '.join(f'{m:.2f} s' for m in medians)} |")
    sums = [sorted(sum(one.values()) for one in found) for found in columns.values()]
    cells = [f"{statistics.median(s):.1f} s ({s[0]:.1f} to {s[-1]:.1f})" for s in sums]
    print(f"| all | | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
