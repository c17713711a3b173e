"""Runs many random programs on one process and on several ranks, and shows those that differ.

    python -m tests.programs.run [--seeds N] [--first N] [--ranks 2,3] [--auto]

One job of each number of ranks runs many programs, because TensorFlow starts slowly. A program that
differs is run again, by one process with weights that differ in their last digits: if that comes to
other results, too, the program proves nothing. Otherwise it is made as short as it can be.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.harness import ranks
from tests.programs import draw
from tests.programs.draw import Spec

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 120  # no program takes nearly as long
TOGETHER = 60  # programs of a job: TensorFlow does not free all memory
NOISY = 3  # processes that round otherwise


# Relative and absolute; one process that rounds otherwise comes as near.
TOLERANCES = {"float32": (1e-3, 1e-4), "mixed_float16": (0.02, 0.01), "mixed_bfloat16": (0.1, 0.04)}
# By how much weights are changed, for one process that rounds otherwise.
NOISE = {"float32": 1e-6, "mixed_float16": 5e-4, "mixed_bfloat16": 4e-3}

Seen = dict[str, Any]


def load(path: pathlib.Path) -> Seen | None:
    """What a process has shown; None if it did not come to the end."""
    if not path.exists():
        return None
    with np.load(path) as file:
        return {name.replace("|", "/"): file[name] for name in file}


def differences(one: Seen, other: Seen, tolerance: tuple[float, float]) -> list[str]:
    """How what two processes show differs."""
    found = []
    if "error" in one or "error" in other:
        texts = [str(seen.get("error", "no error")) for seen in (one, other)]
        return [] if texts[0] == texts[1] else [f"error: {texts[0]} | {texts[1]}"]
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            found.append(f"{name}: only {'the first' if name in one else 'the second'} has it")
        elif one[name].shape != other[name].shape:
            found.append(f"{name}: shape {one[name].shape} | {other[name].shape}")
        else:
            mine, theirs = (np.asarray(seen[name], "float64") for seen in (one, other))
            if not np.allclose(mine, theirs, *tolerance, equal_nan=True):
                at = np.argmax(np.nan_to_num(np.abs(mine - theirs), nan=np.inf))
                values = f"{mine.flat[at]:.6g} | {theirs.flat[at]:.6g}"
                found.append(f"{name}: {values}, at {at} of {mine.size}")
    return found


def between_ranks(ranks: list[Seen], averages: bool) -> list[str]:
    """How the ranks differ in what must be equal bit for bit."""
    found = []
    for rank, seen in enumerate(ranks[1:], 1):
        for name, value in seen.items():
            is_own = ("history" in name or "evaluated" in name) and not averages
            mine = ranks[0].get(name)
            if is_own or name == "error":
                continue
            if mine is None or mine.tobytes() != value.tobytes():
                found.append(f"rank {rank} differs from rank 0: {name}: {mine} | {value}"[:300])
    return found


def is_finite(seen: Seen) -> bool:
    """Whether no number is NaN or infinite, but for those that CSV files lack."""
    return all(np.isfinite(v).all() for k, v in seen.items() if ".csv" not in k and k != "error")


class Job:
    """A job that runs programs; if it hangs or dies, another one goes on behind that program."""

    def __init__(self, size: int, specs: dict[str, Spec], folder: pathlib.Path, how: str) -> None:
        self.size, self.folder, self.how = size, folder / f"{size}", how
        self.folder.mkdir()
        self.left = dict(specs)
        self.died: dict[str, str] = {}  # what a job printed that died in a program
        self.begin()

    def begin(self) -> None:
        """Start a process for each rank."""
        self.output, self.when = self.folder / "output", time.time()
        specs = self.folder / "specs.json"
        specs.write_text(json.dumps(self.left))
        how = "ranks" if self.how == "ranks" and self.size > 1 else "alone"
        command = [sys.executable, "-m", "tests.programs.program", how, str(specs)]
        command.append(str(self.folder))
        # Ranks that wait for different collectives get an error soon.
        env = {"HVD_MISMATCH_SECONDS": "5", "HVD_TIMEOUT_SECONDS": "60"}
        env["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests/harness/start"
        if self.how == "auto" and self.size > 1:
            hvdrun = [sys.executable, "-m", "hvd_keras.hvdrun", "--auto", "--oversubscribe"]
            with self.output.open("wb") as file:
                self.process = subprocess.Popen(
                    [*hvdrun, "-np", str(self.size), *command],
                    **{"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file},
                    **{"env": os.environ | env, "start_new_session": True},
                )
        else:
            self.process = ranks.start(self.size, *command, output=self.output, env=env)

    def is_over(self) -> bool:
        """Whether all programs have run; goes on after one that hangs."""
        before = len(self.left)
        while self.left and all(p.exists() for p in self.paths(next(iter(self.left)))):
            self.left.pop(next(iter(self.left)))
        if len(self.left) < before:
            self.when = time.time()
        has_ended = self.process.poll() is not None
        if not self.left:
            return has_ended or time.time() - self.when > 20
        if has_ended or time.time() - self.when > SECONDS:
            ranks.end(self.process)
            printed = self.output.read_text(errors="replace")[-1500:]
            name = next(iter(self.left))
            self.left.pop(name)
            self.died[name] = f"the job {'died' if has_ended else 'hung'}: {printed}"
            if self.left:
                self.begin()
        return False

    def paths(self, name: str) -> list[pathlib.Path]:
        """What the ranks write about a program."""
        several = 1 if self.how == "auto" else self.size
        return [self.folder / f"{name}.{rank}.npz" for rank in range(several)]

    def seen(self, name: str) -> list[Seen]:
        """What all ranks have shown."""
        loaded = [load(path) for path in self.paths(name)]
        if None in loaded:
            return [{"error": self.died.get(name, "did not run")}]
        return loaded


def run(specs: dict[str, Spec], sizes: Iterable[int], how: str) -> dict[str, list[str]]:
    """How each program differs from that of one process: not at all, if it is not in the result.

    A first word in capital letters says that it proves nothing: FAILS alone, or is UNSTABLE.
    """
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(size, specs, pathlib.Path(folder), how) for size in (1, *sizes)]
        try:
            while sum(job.is_over() for job in jobs) < len(jobs):
                time.sleep(0.1)
        finally:
            for job in jobs:
                ranks.end(job.process)
        for name, spec in specs.items():
            (alone,), *others = [job.seen(name) for job in jobs]
            if "error" in alone or not is_finite(alone):
                found[name] = [f"FAILS {alone.get('error', 'not finite')}"]
                continue
            tolerance = TOLERANCES[spec.get("precision", "float32")]
            told = []
            for job, seen in zip(jobs[1:], others, strict=True):
                differ = differences(alone, seen[0], tolerance)
                differ += between_ranks(seen, spec.get("average", True))
                told += [f"{job.size} ranks: {text}" for text in differ]
            if told:
                found[name] = told
    return found


def unstable(specs: dict[str, Spec]) -> set[str]:
    """Which programs differ from themselves if one process rounds otherwise."""
    noisy = {}
    for name, spec in specs.items():
        noise = NOISE[spec.get("precision", "float32")]
        noisy |= {f"{name}-{i}": {**spec, "noise": noise * i} for i in range(NOISY + 1)}
    found = set()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(1, noisy, pathlib.Path(folder), "ranks")
        while not job.is_over():
            time.sleep(0.1)
        ranks.end(job.process)
        for name, spec in specs.items():
            tolerance = TOLERANCES[spec.get("precision", "float32")]
            (usual,), *others = [job.seen(f"{name}-{i}") for i in range(NOISY + 1)]
            half = tolerance[0] / 2, tolerance[1] / 2
            if any(differences(usual, other, half) for (other,) in others):
                found.add(name)
    return found


def judged(specs: dict[str, Spec], sizes: Iterable[int], how: str) -> dict[str, list[str]]:
    """As ``run``, with UNSTABLE ones."""
    found = run(specs, sizes, how)
    differing = {name: specs[name] for name, told in found.items() if told[0][:6] != "FAILS "}
    for name in unstable(differing) if differing else ():
        found[name] = ["UNSTABLE", *found[name]]
    return found


def proves(told: list[str] | None) -> bool:
    """Whether a program differs, and not only in itself."""
    return bool(told) and told[0].split()[0] not in ("FAILS", "UNSTABLE")


def shrink(spec: Spec, told: list[str], how: str) -> tuple[Spec, list[str]]:
    """The shortest program that still differs, and how."""
    sizes = sorted({int(text.split()[0]) for text in told})[:1]
    while candidates := {str(i): other for i, other in enumerate(draw.simpler(spec))}:
        found = judged(candidates, sizes, how)
        differing = [name for name in candidates if proves(found.get(name))]
        if not differing:
            break
        # As many at once as still differ together.
        together = draw.legal(
            {k: v for k, v in spec.items() if all(k in candidates[n] for n in differing)}
        )
        both = judged({"together": together}, sizes, how) if len(differing) > 1 else {}
        if proves(both.get("together")):
            spec, told = together, both["together"]
        else:
            shortest = min(differing, key=lambda name: len(json.dumps(candidates[name])))
            spec, told = candidates[shortest], found[shortest]
    return spec, told


def main() -> int:
    """Runs the programs of many seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks (default: 2,3)")
    parser.add_argument("--auto", action="store_true", help="by hvdrun --auto, with no own lines")
    parser.add_argument("--as-drawn", action="store_true", help="do not shorten what differs")
    given = parser.parse_args()
    sizes, how = [*map(int, given.ranks.split(","))], "auto" if given.auto else "ranks"
    counts: collections.Counter[str] = collections.Counter()
    last = given.first + given.seeds
    for first in range(given.first, last, TOGETHER):
        specs = {str(s): draw.draw(s) for s in range(first, min(first + TOGETHER, last))}
        found = judged(specs, sizes, how)
        for name, spec in specs.items():
            told = found.get(name, ["same"])
            counts[told[0].split()[0] if not proves(found.get(name)) else "DIFFERS"] += 1
            if told[0] != "same":
                print(f"seed {name}: {told[0]}"[:300], flush=True)
            if proves(found.get(name)):
                short = spec
                if not given.as_drawn:
                    short, told = shrink(spec, told, how)
                print(f"  {json.dumps(short)}", *told[:6], sep="\n  ", flush=True)
        print(f"until seed {max(map(int, specs))}: {dict(counts)}", flush=True)
    return min(counts["DIFFERS"], 1)


if __name__ == "__main__":
    from tests import conftest  # noqa: F401 (one thread, and no GPU)

    sys.exit(main())
