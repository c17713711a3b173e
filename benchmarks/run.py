"""Runs all benchmarks and writes their results as JSON, as Markdown tables, and as plots.

    make bench
    python benchmarks/run.py --smoke
    python benchmarks/run.py --peer-python /path/to/environment/of/horovod/bin/python
    python benchmarks/run.py --jax-python /path/to/environment/of/jax/bin/python

Every benchmark compares two things that it measures in turn in one job, with one thread per
process, and verifies their values. Horovod needs another TensorFlow, so it runs in a separate job
that takes turns with that of hvd_keras; see peer.py for its environment.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
LIMIT = 600  # seconds; far more than any benchmark takes

# The numbers of ranks for each benchmark; those with None, and core, start their ranks themselves.
FULL = {
    "core": [2, 4],
    "startup": [None],
    "latency": [2],
    "fit": [2],
    "backends": [None],
    "gradients": [2, 4],
    "growth": [16],
    "sparse": [2],
    "waiting": [2],
    "hosts": [None],
}
PEERS = ("--peers", "mpich", "impi", "oneccl")  # of core, besides Open MPI
SMOKE = FULL | {"core": [2], "gradients": [2], "growth": [4], "keras_models": [None]}


def measured(name: str, ranks: int | None, smoke: bool, *more: str) -> list[report.Row]:
    """The rows that one benchmark prints.

    Raises:
        SystemExit: the benchmark fails, or takes longer than LIMIT.
    """
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *["--smoke"] * smoke, *more]
    if ranks is not None:
        job = [sys.executable, "-m", "hvd_keras.hvdrun", "-np", str(ranks), "--oversubscribe"]
        command = [*job, "--no-prefix", *command]
    threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "CCL_LOG_LEVEL": "error"}
    environment = os.environ | dict.fromkeys(threads, "1") | quiet
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"benchmarks/{name}.py takes longer than {LIMIT} s") from None
    if done.returncode != 0:
        raise SystemExit(f"benchmarks/{name}.py failed with exit status {done.returncode}")
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"benchmark"'))
    where = "" if ranks is None else f" on {ranks} ranks"
    print(f"{name}{where}: {time.monotonic() - start:.0f} s", flush=True)
    return [{"benchmark": name, **row} for row in json.loads(line)["rows"]]


def machine() -> dict[str, Any]:
    """Describes the machine and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    packages = ("hvd_keras", "tensorflow", "keras", "mpi4py")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def in_words(results: dict[str, Any]) -> str:
    # The benchmarks' ranks load the machine, too; a much higher load comes from other jobs.
    load = f"load average {results['load_before']:.1f} before, {results['load_after']:.1f} after"
    facts = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    size = "Tiny sizes, not meaningful. " if results["smoke"] else ""
    return f"{size}Measured {results['date']}; {facts}; {load}."


def sections(rows: list[report.Row]) -> dict[str, list[report.Row]]:
    """Groups the rows by benchmark."""
    found: dict[str, list[report.Row]] = {}
    for row in rows:
        found.setdefault(row["benchmark"], []).append(row)
    return found


def plot(rows: list[report.Row], path: Path) -> None:
    """Plots ratios as bars with quartiles, and a line at 1."""
    pyplot = report.pyplot()
    labels = [f"{row['what']}\n{row['ranks']} ranks, to {row['against']}" for row in rows]
    ratios = [row["ratio"] for row in rows]
    spread = [
        [row["ratio"] - row["quartiles"][0] for row in rows],
        [row["quartiles"][1] - row["ratio"] for row in rows],
    ]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes.barh(labels, ratios, xerr=spread, capsize=3, color="#5b8db8")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("time of hvd_keras over the other's; bars: medians, lines: quartiles")
    if max(ratios) > 20 * min(ratios):
        axes.set_xscale("log")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_sizes(rows: list[report.Row], path: Path) -> None:
    """Plots the engine's and its peers' times for one tensor against its size."""
    pyplot = report.pyplot()
    units = {"B": 1, "KB": 1 << 10, "MB": 1e6}
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        number, _, unit = row["what"].partition(" ")
        if unit in units:
            size = float(number) * units[unit]
            side = row["against"].partition(",")[0]
            lines.setdefault("hvd_keras", {})[size] = row["seconds"] * 1e6
            lines.setdefault(side, {})[size] = row["against_seconds"] * 1e6
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for side, times in lines.items():
        style = {"hvd_keras": "o-", "memcpy": "--", "one pass in place": ":"}.get(side, ".-")
        width = 2.5 if side == "hvd_keras" else 1
        axes.plot(list(times), list(times.values()), style, linewidth=width, label=side)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes results.json, results.md and, with matplotlib, a plot for each benchmark."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    parts = [f"# Benchmarks\n\n{in_words(results)}\n"]
    by_name = sections(results["rows"])
    parts += [f"\n## {name}\n\n{report.table(rows)}\n" for name, rows in by_name.items()]
    (folder / "results.md").write_text("".join(parts))
    if importlib.util.find_spec("matplotlib") is None:
        print("No plots, because matplotlib is missing: pip install 'hvd_keras[bench]'")
        return
    for name, rows in by_name.items():
        plot(rows, folder / f"{name}.png")
    if "core" in by_name:
        two = [row for row in by_name["core"] if row["ranks"] == 2]
        plot_sizes(two, folder / "sizes.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, as a quick check")
    parser.add_argument("--only", nargs="+", choices=FULL, metavar="NAME", default=list(FULL))
    parser.add_argument("--output", type=Path, default=HERE / "results", help="a folder")
    parser.add_argument("--peer-python", help="Python of an environment with Horovod")
    parser.add_argument("--jax-python", help="Python of an environment with Keras and JAX")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else FULL
    jobs: list[Any] = [(name, ranks) for name in options.only for ranks in plan[name]]
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = [(*job, "--output", str(options.output)) if job[0] == "hosts" else job for job in jobs]
    # The other peers spin while they wait: with more ranks than cores they take many minutes.
    cores = 0 if options.smoke else len(os.sched_getaffinity(0))
    jobs = [
        (name, None, "--ranks", str(ranks), *(PEERS if ranks <= cores else ()))
        if name == "core"
        else (name, ranks, *more)
        for name, ranks, *more in jobs
    ]
    if options.jax_python:
        more = ("--jax-python", options.jax_python)
        jobs = [(*job, *more) if job[0] == "backends" else job for job in jobs]
    if options.peer_python:  # first, because its environment may be unusable
        jobs.insert(0, ("peer", None, "--peer-python", options.peer_python))
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "smoke": options.smoke,
        "machine": machine(),
        "load_before": os.getloadavg()[0],
        "rows": [],
    }
    try:
        for name, ranks, *more in jobs:
            results["rows"] += measured(name, ranks, options.smoke, *more)
    finally:  # a benchmark that fails does not lose the others' results
        if results["rows"]:
            results["load_after"] = os.getloadavg()[0]
            write(results, options.output)
            print(f"Results: {options.output / 'results.md'}")


if __name__ == "__main__":
    main()
