"""What ranks divide, tables and optimizer state: memory, and jobs killed while they save."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.harness import ranks

MEMORY = """
import resource, sys
import keras
import numpy as np
import hvd_keras as hvd

hvd.init()
rows, columns, room = 1 << 22, 64, 950 << 20  # the table has 1 GiB
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
shard = "rows" if hvd.size() > 1 else None
model = keras.Sequential([
    keras.Input((4,), dtype="int64"),
    hvd.layers.Embedding(rows, columns, shard=shard, combiner="sum"),
    keras.layers.Dense(1),
])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
model.compile(optimizer, loss="mse", run_eagerly=True)
ids = np.random.default_rng(hvd.rank()).integers(0, rows, (64, 4))
model.fit(ids, np.ones((64, 1)), batch_size=16, verbose=0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
print("trained", flush=True)
"""


@pytest.mark.slow
def test_a_table_that_one_rank_cannot_hold_trains_on_four(tmp_path: pathlib.Path) -> None:
    # Threads have stacks and heaps of their own, which count as address space.
    settings = {"MALLOC_ARENA_MAX": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    one = ranks.run_script(tmp_path, 1, MEMORY, timeout=900, **settings)
    assert one.status != 0, one.output
    assert "trained" not in one.output
    four = ranks.run_script(tmp_path, 4, MEMORY, timeout=900, **settings)
    assert four.status == 0, four.output
    assert four.output.count("trained") == 4


TRAINING = """
import hashlib, os, sys
import keras
import numpy as np
import hvd_keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.Input((4,), dtype="int64"),
    hvd.layers.Embedding(40_000, 16, shard="rows", combiner="sum"),
    keras.layers.Dense(300, activation="relu"),
    keras.layers.Dense(300, activation="relu"),
    keras.layers.Dense(1),
])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)
model.compile(optimizer, loss="mse", run_eagerly=True)
random = np.random.default_rng(0)
rows = random.integers(0, 40_000, (2 * 8 * 12, 4)), random.normal(size=(2 * 8 * 12, 1))
checkpoint = hvd.callbacks.Checkpoint(sys.argv[1], save_freq=1)
data = hvd.data.shard(rows, batch_size=8)
print("rank", hvd.rank(), "pid", os.getpid(), flush=True)
seen = []
note = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: logs and seen.append(batch)
)
model.fit(data, epochs=1, verbose=0, shuffle=False,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), checkpoint, note])
table, *rest = model.layers
state = [table.get_table(), *(weight for layer in rest for weight in layer.get_weights())]
digest = hashlib.sha256(b"".join(part.tobytes() for part in state)).hexdigest()
print("began with", seen[0] if seen else "the end", "ends with", digest, flush=True)
"""


def unfinished(folder: pathlib.Path) -> set[str]:
    """The files that are being written."""
    return {path.name for path in folder.iterdir() if path.name.startswith(".")}


def killed(script: pathlib.Path, folder: pathlib.Path, seed: int) -> tuple[str, bool]:
    """Kills a rank that is writing its part of a checkpoint, not the first of this job.

    Returns:
        What the job has printed, and whether the rank left an unfinished file.
    """
    command = [ranks.MPIRUN, "-np", "2", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    command += ["--allow-run-as-root"] * (os.geteuid() == 0)
    process = subprocess.Popen(
        [*map(str, command), sys.executable, "-u", str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids: dict[int, int] = {}
    lines = []
    for line in process.stdout:
        lines.append(line)
        pids |= {int(r): int(pid) for r, pid in re.findall(r"rank (\d) pid (\d+)", line)}
        if len(pids) == 2:
            break
    rank = seed % 2
    mine = re.compile(rf"\.checkpoint-.*-000{rank}\.h5\..*")
    before = {path.name for path in folder.glob("checkpoint-?????-???????.h5")}
    limit = time.monotonic() + 200
    while process.poll() is None:
        assert time.monotonic() < limit, "".join(lines)
        now = {path.name for path in folder.glob("checkpoint-?????-???????.h5")}
        if now - before and any(mine.fullmatch(name) for name in unfinished(folder)):
            os.kill(pids[rank], signal.SIGKILL)
            break
    lines += process.stdout.readlines()
    process.wait()
    return "".join(lines), any(mine.fullmatch(name) for name in unfinished(folder))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_saves_loses_nothing(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    (tmp_path / "saved").mkdir()
    undisturbed = ranks.mpirun(2, sys.executable, str(script), str(tmp_path / "other"), timeout=900)
    expected = re.search("ends with (.*)", undisturbed.output)
    assert expected, undisturbed.output
    torn = 0
    for seed in range(3):
        output, in_mid_write = killed(script, tmp_path / "saved", seed)
        assert "damaged" not in output
        torn += in_mid_write
    assert torn > 0, "no kill came in mid write"
    last = ranks.mpirun(2, sys.executable, str(script), str(tmp_path / "saved"), timeout=900)
    assert last.status == 0, last.output
    assert "damaged" not in last.output
    assert last.output.count(f"ends with {expected[1]}") == 2, last.output
    assert "began with 0 " not in last.output, "it goes on"
    mains = list((tmp_path / "saved").glob("checkpoint-?????-???????.h5"))
    assert len(list((tmp_path / "saved").iterdir())) == 3 * len(mains), "nothing else is left"
