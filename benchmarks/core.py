"""The engine of hvd_keras, called from C++, against MPI libraries, oneCCL and the memory's speed.

    python benchmarks/core.py --ranks 2 --peers mpich impi oneccl

One C++ program (native/core.cc) is compiled for each side. All jobs are alive at once and take
turns: the ranks of those that wait are stopped, because MPI's ranks spin. The order changes every
other turn.
hvd_keras's time includes the ranks' agreement on the request, but no TensorFlow. MPI sums large
tensors in one call, or in pieces of 256 KiB to 4 MiB as an expert would; its best is shown, tensor
by tensor, which needs no packing. The bounds: memcpy of the same bytes, and one pass that reads and
writes them in place, on all cores at once.

Peers are installed from PyPI, each into its own folder, when they are used for the first time.
"""

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import layers
import report
from peer import LIMIT_OF_ALL, Job

HERE = Path(__file__).parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "benchmarks"
# What each peer is made of. Newer wheels of oneCCL end with a segmentation fault at their start.
PACKAGES = {
    "mpich": ["mpich"],
    "impi": ["impi-rt"],  # has no headers: those of MPICH are of the same binary interface
    "oneccl": ["oneccl-devel==2021.15.2", "impi-rt"],
}
TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI", "oneccl": "oneCCL"}
PIECES = (0, 256 << 10, 1 << 20, 4 << 20)


@dataclasses.dataclass
class Case:
    """Tensors to sum, by their numbers of float32."""

    title: str
    sizes: list[int]
    calls: int
    elsewhere: bool = False

    def line(self, way: str, piece: int = 0) -> str:
        sizes = " ".join(map(str, self.sizes))
        return f"{way} {piece} {int(self.elsewhere or way == 'copy')} {self.calls} {sizes}"


def cases(smoke: bool) -> list[Case]:
    """Returns the rows of the table."""
    if smoke:
        return [Case("4 B", [1], 10), Case("two tensors", [1000, 70_000], 2)]
    resnet = [int(size) // 4 for size in layers.network("ResNet50").sizes]
    whole = sum(resnet)
    return [
        Case("4 B", [1], 2000),
        Case("1 KB", [256], 2000),
        Case("64 KB", [16 << 10], 500),
        Case("1 MB", [256 << 10], 100),
        Case("16 MB", [4 << 20], 10),
        Case("102 MB", [whole], 3),
        Case("102 MB, result elsewhere", [whole], 3, elsewhere=True),
        Case(f"ResNet-50's {len(resnet)} gradients", resnet, 3),
    ]


def compiled(name: str, compiler: list[str], *more: str) -> Path:
    """Compiles native/core.cc for one side and returns the program."""
    BUILD.mkdir(parents=True, exist_ok=True)
    program = BUILD / f"core-{name}"
    source = str(HERE / "native" / "core.cc")
    subprocess.run([*compiler, "-std=c++17", "-O3", source, "-o", str(program), *more], check=True)
    return program


def installed(peer: str) -> Path:
    """Installs a peer from PyPI into its own folder, once, and returns it."""
    folder = BUILD / "peers" / peer
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        unfinished = folder.with_name(f"{peer}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run([*pip, "--prefix", str(unfinished), *PACKAGES[peer]], check=True)
        unfinished.rename(folder)
    return folder


def own_library() -> Path:
    """Returns the core that is installed, for Open MPI."""
    import hvd_keras

    (library,) = (Path(p) / "native/openmpi/libhvd_core.so" for p in hvd_keras.__path__[:1])
    if not library.exists():
        (library,) = Path(sys.prefix).glob("lib/*/site-packages/hvd_keras/native/openmpi/*core.so")
    return library


def program_of_hvd(name: str, headers: Path, library: Path) -> Path:
    """Compiles native/core.cc for the engine."""
    compiler = [str(Path(sys.executable).with_name("mpicxx"))]
    more = [f"-I{headers}", str(library), f"-Wl,-rpath,{library.parent}", "-lpthread"]
    return compiled(name, compiler, "-DHVD", *more)


def command_of_hvd(name: str, headers: Path, library: Path, ranks: int) -> list[str]:
    job = [sys.executable, "-m", "hvd_keras.hvdrun", "--oversubscribe", "--no-init"]
    return [*job, "-np", str(ranks), str(program_of_hvd(name, headers, library))]


def command_of_peer(peer: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Returns the command of a peer's job, and its environment."""
    if peer == "openmpi":
        tools = Path(sys.executable)
        program = compiled(peer, [str(tools.with_name("mpicxx"))])
        bind = "core" if ranks <= len(os.sched_getaffinity(0)) else "none"
        job = [str(tools.with_name("mpirun")), "--allow-run-as-root", "--bind-to", bind]
        return [*job, "--map-by", ":OVERSUBSCRIBE", "-np", str(ranks), str(program)], {}
    folder, headers = installed(peer), installed("mpich") / "include"
    lib = folder / "lib"
    link = [f"-I{headers}", f"-L{lib}", f"-Wl,-rpath,{lib}", str(lib / "libmpi.so.12")]
    if peer == "oneccl":
        link += ["-DCCL", f"-I{folder / 'include'}", "-lccl"]
    program = compiled(peer, ["g++"], *link)
    settings = {"LD_LIBRARY_PATH": str(lib)}
    if peer != "mpich":
        settings |= {"I_MPI_ROOT": str(folder), "I_MPI_FABRICS": "shm", "CCL_ROOT": str(folder)}
    return [str(folder / "bin" / "mpiexec.hydra"), "-n", str(ranks), str(program)], settings


@contextlib.contextmanager
def jobs() -> Iterator[tuple[str, socket.socket, dict[str, Job]]]:
    """Yields the address for ranks to call, its listener, and the jobs, to be filled by the caller.

    All of them end afterwards.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "turns")
        listener.bind(address)
        listener.listen(1000)
        listener.settimeout(1)
        started: dict[str, Job] = {}
        try:
            yield address, listener, started
        finally:
            for job in started.values():
                job.end()


def rows_of(case: Case, running: dict[str, Job], repeats: int, ranks: int) -> list[report.Row]:
    """Measures a case on all sides in turn and compares hvd_keras with each."""
    ways = {"hvd_keras": ("hvd_keras", case.line("sum"))}
    for name in running:
        if name == "hvd_keras":
            continue
        pieces = PIECES if name in TITLES and sum(case.sizes) > 1 << 20 else (0,)
        for piece in pieces if name != "oneccl" else (0,):
            size = f", pieces of {piece >> 10} KiB" if piece else ""
            ways[f"{TITLES.get(name, name)}{size}"] = (name, case.line("sum", piece))
    ways["memcpy, all at once"] = ("openmpi", case.line("copy"))
    ways["one pass in place"] = ("openmpi", case.line("pass"))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way in list(ways) if turn % 2 else list(ways)[::-1]:
            name, line = ways[way]
            times[way].append(running[name].measure(line))
    ours = times.pop("hvd_keras")[1:]
    best: dict[str, str] = {}  # of the sizes of pieces, for each side
    for way, taken in times.items():
        side = way.partition(", pieces")[0]
        if side not in best or statistics.median(taken) < statistics.median(times[best[side]]):
            best[side] = way
    return [report.compare(case.title, ranks, way, ours, times[way][1:]) for way in best.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="of each job (default 2)")
    parser.add_argument("--peers", nargs="*", choices=PACKAGES, default=[], help="besides Open MPI")
    parser.add_argument("--against", type=Path, help="another checkout, with its build folder")
    parser.add_argument("--only", help="the cases with this text in their titles")
    parser.add_argument("--repeats", type=int, help="of each measurement (default 11)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, as a quick check")
    options = parser.parse_args()
    ranks, repeats = options.ranks, options.repeats or (2 if options.smoke else 11)
    native = ROOT / "native"
    commands = {"hvd_keras": (command_of_hvd("hvd_keras", native, own_library(), ranks), {})}
    if options.against:
        library = next((options.against / "build").glob("**/openmpi/libhvd_core.so"))
        other = command_of_hvd("other", options.against / "native", library, ranks)
        commands[str(options.against)] = (other, {})
    commands |= {peer: command_of_peer(peer, ranks) for peer in ("openmpi", *options.peers)}
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))
    signal.alarm(LIMIT_OF_ALL)
    rows = []
    with jobs() as (address, listener, running):
        for name, (command, settings) in commands.items():
            running[name] = Job([*command, address], ranks, listener, settings)
        for case in cases(options.smoke):
            if options.only is None or options.only in case.title:
                rows += rows_of(case, running, repeats, ranks)
    report.show(rows, options.json)


if __name__ == "__main__":
    main()
