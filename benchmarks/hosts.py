"""Sums and training steps over slow links, on three hosts; starts its jobs itself.

    python benchmarks/hosts.py

The hosts are namespaces of this machine (tests/harness/hosts.py; needs root), and each sends at
most 100 Mbit/s. The minimum time of a sum over N hosts is 2(N-1)/N of its bytes over that
bandwidth; headers of Ethernet, IP and TCP, about 5 %, are not included. Each setting of
HVD_ALLREDUCE needs a separate job, because it is read at the start. The links, not the shared
machine, determine the times.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import report

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tests.harness.hosts import Hosts, missing  # noqa: E402

COUNT = 3
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
    command = [sys.executable, "-m", "hvd_keras.launch", "-np", COUNT * per_host, "-H", slots]
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
    for way in ("ring", "mpi"):
        one = taken(HVD_ALLREDUCE=way)
        label = f"{what}, HVD_ALLREDUCE={way}"
        rows.append(report.compare(label, ranks, "the minimum", one["seconds"], least))
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
    options = parser.parse_args()
    rows: list[report.Row] = []
    if why := missing():
        print(f"benchmarks/hosts.py measures nothing: {why}", file=sys.stderr)
    else:
        repeats = options.repeats or (2 if options.smoke else 5)
        megabits, size = (1000, 1_000_000) if options.smoke else (100, 10_000_000)
        with Hosts(COUNT) as hosts:
            hosts.throttle(megabits)
            rows = sums(hosts, megabits, size, repeats, options.smoke)
            if not options.smoke:
                rows += steps(hosts, repeats, options.output)
    report.show(rows, options.json)


if __name__ == "__main__":
    main()
