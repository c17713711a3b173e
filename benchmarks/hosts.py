"""Sums and training steps over slow links, on three hosts; starts its jobs itself.

    python benchmarks/hosts.py
    python benchmarks/hosts.py --many 64    # instead, the algorithms between so many hosts
    python benchmarks/hosts.py --constants  # instead, constants of model.py

The hosts are namespaces of this machine (tests/harness/hosts.py; needs root), and each sends at
most 100 Mbit/s. The minimum time of a sum over N hosts is 2(N-1)/N of its bytes over that
bandwidth; headers of Ethernet, IP and TCP, about 5 %, are not included. Each setting of
HVD_ALLREDUCE needs a separate job, because it is read at the start. Of three hosts the links, not
the shared machine, determine the times; of many the cores, which model.py takes into account.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import core
import model
import report
from peer import Job, end_in_time

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tests.harness.hosts import Hosts, missing  # noqa: E402

COUNT = 3
MEGABITS = 100
# Of the algorithms between many hosts: HVD_ALLREDUCE, and calls by their bytes.
WAYS = ("direct", "grid")
SIZES = {4: 20, 64 << 10: 10, 1 << 20: 3, 10_000_000: 1}
LIMIT = 300  # seconds for a job


def least_seconds(size: int, megabits: float) -> float:
    """Returns the minimum time of a sum of ``size`` bytes per host."""
    return 2 * (COUNT - 1) / COUNT * size * 8 / (megabits * 1e6)


def job(hosts: Hosts, script: str, *options: object, per_host: int = 1, **settings: str) -> dict:
    """Runs a job and returns the JSON that the script prints on rank 0.

    Raises:
        SystemExit: the job fails.
    """
    slots = ",".join(f"{host.name}:{per_host}" for host in hosts)
    command = [sys.executable, "-m", "hvd_keras.hvdrun", "-np", COUNT * per_host, "-H", slots]
    command += ["--no-prefix", "--oversubscribe"]
    command += [sys.executable, HERE / script, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | settings
    environment.pop("TF_NUM_INTEROP_THREADS", None)  # let hvdrun choose
    done = hosts[0].run(list(map(str, command)), timeout=LIMIT, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{script} {settings} failed:\n{done.stdout}{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return json.loads(lines[-1])


def sums(hosts: Hosts, megabits: float, size: int, repeats: int, smoke: bool) -> list[report.Row]:
    ranks = len(hosts)
    what = f"a sum of {size / 1e6:g} MB over {ranks} hosts"

    def taken(*options: object, **others) -> dict[str, list[float]]:
        found = job(hosts, "across.py", "--bytes", size, "--repeats", repeats, *options, **others)
        return found[str(size)]

    plain = taken()
    least = [least_seconds(size, megabits)] * repeats
    rows = [report.compare(what, ranks, "the minimum", plain["seconds"], least)]
    half = taken("--fp16")
    rows.append(
        report.compare(f"{what}, fp16", ranks, "uncompressed", half["seconds"], plain["seconds"])
    )
    if smoke:
        return rows
    raw = taken("--raw")
    label = f"{what}, MPI_Allreduce alone"
    rows.append(report.compare(label, ranks, "the minimum", raw["seconds"], least))
    two = taken(per_host=2)
    label = f"{what} with 2 ranks each"
    rows.append(report.compare(label, 2 * ranks, "the minimum", two["seconds"], least))
    rows.append(
        report.compare(
            f"{what} with 2 ranks each: what a host sends, as time on its link",
            2 * ranks,
            "with 1 rank each",
            *([sent * 8 / (megabits * 1e6) for sent in one["sent"]] for one in (two, plain)),
        )
    )
    large = job(hosts, "across.py", "--bytes", 10 * size, "--repeats", 2)[str(10 * size)]
    label = f"a sum of {size / 1e5:g} MB over {ranks} hosts"
    least = [least_seconds(10 * size, megabits)] * 2
    rows.append(report.compare(label, ranks, "the minimum", large["seconds"], least))
    return rows


@contextlib.contextmanager
def engines(hosts: Hosts, ways: Sequence[str], per_host: int) -> Iterator[dict[str, Job]]:
    """Starts a job of core.py's C++ program for each HVD_ALLREDUCE; their ranks are stopped."""
    ranks = len(hosts) * per_host
    slots = ",".join(f"{host.name}:{per_host}" for host in hosts)
    program = core.program_of_hvd("hvd_keras", HERE.parent / "native", core.own_library())
    # MPI counts the cores of each host, which are the same ones.
    settings = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mpi_yield_when_idle": "1"}
    command = [*hosts[0].enter(os.getcwd()), str(Path(sys.executable).with_name("mpirun"))]
    command += ["--allow-run-as-root", "--bind-to", "none", "-H", slots, "-np", str(ranks)]
    for name in ("HVD_ALLREDUCE", *settings):
        command += ["-x", name]
    settings["TMPDIR"] = str(hosts[0].temporary)
    with core.jobs() as (address, listener, started):
        for way in ways:
            more = settings | {"HVD_ALLREDUCE": way}
            started[way] = Job([*command, str(program), address], ranks, listener, more)
        yield started


def footprint(job: Job) -> str:
    """Describes the memory and the TCP connections of the ranks that have most."""
    memory, connections = [], []
    for process in job.processes:
        own = Path(f"/proc/{process}")
        memory.append(int((own / "status").read_text().partition("RssAnon:")[2].split()[0]))
        sockets = {os.readlink(file) for file in (own / "fd").iterdir()}
        lines = (own / "net/tcp").read_text().splitlines()[1:]
        connections.append(sum(f"socket:[{line.split()[9]}]" in sockets for line in lines))
    return f"at most {max(memory) / 1024:.1f} MiB and {max(connections)} sockets of TCP per rank"


def many(
    hosts: Hosts, per_host: int, ways: Sequence[str], sizes: Sequence[int], repeats: int
) -> list[report.Row]:
    """Measures the algorithms between many hosts in turn, without TensorFlow."""
    ranks, rows = len(hosts) * per_host, []
    cluster = model.Cluster(len(hosts), MEGABITS * 1e6 / 8 * model.TCP_SHARE, 0, per_host)
    agreed: dict[str, float] = {}  # the seconds of a single element
    with engines(hosts, ways, per_host) as running:
        for size in sizes:
            cases = {way: (way, "sum") for way in ways} | {"MPI_Allreduce": (ways[0], "mpi")}
            times: dict[str, list[float]] = {case: [] for case in cases}
            for turn in range(repeats + 1):
                for case in list(cases) if turn % 2 else list(cases)[::-1]:
                    job, way = cases[case]
                    line = f"{way} 0 0 {SIZES.get(size, 1)} {size // 4}"
                    times[case].append(running[job].measure(line))
            times = {case: taken[1:] for case, taken in times.items()}
            for case, taken in times.items():
                what = f"{size} bytes over {len(hosts)} hosts of {per_host} ranks, {case}"
                if case != ways[0]:
                    rows.append(report.compare(what, ranks, ways[0], taken, times[ways[0]]))
                if size <= model.ELEMENT_BYTES:
                    agreed[case] = statistics.median(taken)
                elif case in agreed and case in model.BETWEEN:
                    exchange = cluster.between(size, case)
                    predicted = exchange.on_shared_cores(ranks, len(os.sched_getaffinity(0)))
                    predicted = [agreed[case] + predicted] * len(taken)
                    rows.append(report.compare(what, ranks, "the model", taken, predicted))
        for way, job in running.items():
            print(f"{len(hosts)} hosts, {way}: {footprint(job)}", file=sys.stderr)
    return rows


def constants(hosts: Hosts, repeats: int) -> None:
    """Prints constants of model.py, the medians of ``repeats``."""
    short, long, whole = 4, 16 << 10, 100_000_000
    with engines(hosts, ["direct"], 1) as running:

        def seconds(case: str, size: int, calls: int = 1) -> float:
            line = f"{case} 0 {int(case == 'copy')} {calls} {size // 4}"
            taken = [running["direct"].measure(line) for _ in range(repeats + 1)]
            return statistics.median(taken[1:])

        message = seconds("messages", short) / 1000
        byte = (seconds("messages", long) / 1000 - message) / (long - short)
        passes = seconds("pass", whole) + 2 * seconds("copy", whole)  # pack, sum and unpack
        ping = seconds("ping", short, 1000) / 2
        both = seconds("sum", short, 1000)
    print(f"MESSAGE = {message:.2g}\nBYTE = {byte:.2g}\nSUM = {passes / whole:.2g}")
    print(f"a message from one host to another, waited for: {report.duration(ping)}")
    print(f"a sum of 4 bytes over two hosts, agreement included: {report.duration(both)}")


def picture(timeline: Path, compute: float, path: Path) -> None:
    """Draws the last step of a job: when each bucket was exchanged, on rank 0."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    pyplot = report.pyplot()
    events = [e for e in json.loads(timeline.read_text()) if e["ph"] == "X" and e["pid"] == 0]
    events = [e for e in events if not e["name"].startswith("wait")]
    names = [e["args"]["name"] for e in events]
    first, last = names.index("before the step"), names.index("after the step")
    start = events[first]["ts"] + events[first]["dur"]
    buckets = [((e["ts"] - start) / 1e6, e["dur"] / 1e6) for e in events[first + 1 : last]]
    figure, axes = pyplot.subplots(figsize=(9, 2.2), layout="constrained")
    axes.broken_barh([(0, compute)], (1.6, 0.8), color="#c0c0c0")
    axes.broken_barh(buckets, (0.6, 0.8), facecolors=["#5b8db8", "#2f5d85"] * len(buckets))
    axes.set_yticks([2, 1], ["a step without exchange", "buckets of a step with exchange"])
    axes.set_xlabel("seconds since the step began")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def steps(hosts: Hosts, repeats: int, folder: Path) -> list[report.Row]:
    """Measures steps whose gradients are exchanged while backpropagation continues."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        timeline = Path(temporary) / "timeline.json"
        for bucket in (16 << 20, 4 << 20):
            settings = {"HVD_BUCKET_BYTES": str(bucket), "HVD_TIMELINE": str(timeline)}
            taken = job(hosts, "overlap.py", "--repeats", repeats, **settings)
            sequence = [c + e for c, e in zip(taken["compute"], taken["exchange"], strict=True)]
            what = f"a step on {len(hosts)} hosts, buckets of {bucket >> 20} MiB"
            against = "computing, then exchanging"
            rows.append(report.compare(what, len(hosts), against, taken["both"], sequence))
        picture(timeline, statistics.median(taken["compute"]), folder / "overlap.png")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, help="of each measurement (default 5)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, as a quick check")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the picture")
    parser.add_argument("--many", type=int, help="algorithms between so many hosts instead")
    parser.add_argument("--local", type=int, default=1, help="ranks on each of these (default 1)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="of HVD_ALLREDUCE")
    parser.add_argument("--bytes", nargs="+", type=int, default=list(SIZES), help="of the sums")
    parser.add_argument("--constants", action="store_true", help="constants of model.py instead")
    options = parser.parse_args()
    rows: list[report.Row] = []
    if why := missing():
        print(f"benchmarks/hosts.py measures nothing: {why}", file=sys.stderr)
    else:
        repeats = options.repeats or (2 if options.smoke else 5)
        if options.constants:
            with Hosts(2) as hosts:
                return constants(hosts, repeats)
        if options.many:
            end_in_time()
            with Hosts(options.many) as hosts:
                hosts.introduce()
                hosts.throttle(MEGABITS)
                rows = many(hosts, options.local, options.ways, options.bytes, repeats)
                return report.show(rows, options.json)
        megabits, size = (1000, 1_000_000) if options.smoke else (MEGABITS, 10_000_000)
        with Hosts(COUNT) as hosts:
            hosts.throttle(megabits)
            rows = sums(hosts, megabits, size, repeats, options.smoke)
            if not options.smoke:
                rows += steps(hosts, repeats, options.output)
    report.show(rows, options.json)


if __name__ == "__main__":
    main()
