"""Runs many random programs on one process and on several ranks, and shows those that differ.

    python -m tests.programs.run [--seeds N] [--first N] [--ranks 2,3] [--auto] [--pairs]

One job of each number of ranks runs many programs, because TensorFlow starts slowly. A program that
differs is run again, by one process with weights that differ in their last digits: if that comes to
other results, too, the program proves nothing. Otherwise it is made as short as it can be.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tests.harness import ranks
from tests.harness.launcher import LIMIT
from tests.programs import draw
from tests.programs.draw import Spec

ROOT = pathlib.Path(__file__).parents[2]
TOGETHER = 60  # programs of a job: TensorFlow does not free all memory
# Relative and absolute; one process that rounds otherwise comes as near.
TOLERANCES = {"float32": (1e-4, 1e-5), "mixed_float16": (0.02, 0.01), "mixed_bfloat16": (0.1, 0.04)}
# By how much weights are changed, for one process that rounds otherwise; and how often.
NOISE = {"float32": 1e-6, "mixed_float16": 5e-4, "mixed_bfloat16": 4e-3}
NOISY = 3
# Choices that need hvd.init().
OF_HVD = ("order", "compression", "local", "table", "beside")

Seen = dict[str, Any]  # what a process shows, by name
Told = dict[str, list[str]]  # how programs differ, by name


def differences(one: Seen, other: Seen, precision: str, part: float = 1) -> list[str]:
    """How what two processes show differs, by more than a part of the tolerance."""
    found = []
    if "error" in one or "error" in other:
        texts = [str(seen.get("error", "no error")) for seen in (one, other)]
        return [] if texts[0] == texts[1] else [f"error: {texts[0]} | {texts[1]}"]
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            found.append(f"{name}: only {'the first' if name in one else 'the second'} has it")
            continue
        mine, theirs = (np.asarray(seen[name], "float64") for seen in (one, other))
        relative, absolute = (tolerance * part for tolerance in TOLERANCES[precision])
        if mine.shape != theirs.shape:
            found.append(f"{name}: shape {mine.shape} | {theirs.shape}")
        elif not np.allclose(mine, theirs, relative, absolute, equal_nan=True):
            at = np.argmax(np.nan_to_num(np.abs(mine - theirs), nan=np.inf))
            values = f"{mine.flat[at]:.6g} | {theirs.flat[at]:.6g}"
            found.append(f"{name}: {values}, at {at} of {mine.size}")
    return found


def between_ranks(every: list[Seen], averages: bool) -> list[str]:
    """How the ranks differ in what must be equal bit for bit; errors may name the rank."""
    found, first = [], every[0]
    for rank, seen in enumerate(every[1:], 1):
        for name in dict.fromkeys([*first, *seen]):
            is_own = ("history" in name or "evaluated" in name) and not averages
            mine, theirs = first.get(name), seen.get(name)
            is_equal = mine is not None and theirs is not None
            if is_equal and not is_own and name != "error":
                is_equal = mine.tobytes() == theirs.tobytes()
            if not is_equal:
                found.append(f"rank {rank} differs from rank 0: {name}: {mine} | {theirs}")
    return found


def proves_nothing(alone: Seen) -> str:
    """Why not: it fails, or a number is not finite, but for those that CSV files lack."""
    if "error" in alone:
        return str(alone["error"])
    finite = [np.isfinite(value).all() for name, value in alone.items() if ".csv" not in name]
    return "" if all(finite) else "not finite"


class Job:
    """A job that runs programs; if it hangs or dies, another one goes on behind that program."""

    def __init__(self, size: int, specs: dict[str, Spec], folder: pathlib.Path, how: str) -> None:
        self.size, self.folder, self.how = size, folder / f"{size}", how
        self.folder.mkdir()
        self.left = {n: s for n, s in specs.items() if size == 1 or draw.can_run(s, size)}
        self.died: dict[str, str] = {}  # what a job printed that died in a program
        self.begin()

    def begin(self) -> None:
        path = self.folder / "specs.json"
        path.write_text(json.dumps(self.left))
        launcher = [sys.executable, "-m", "hvd_keras.hvdrun", "--oversubscribe", "-np"]
        launcher += [f"{self.size}", *(["--auto"] if self.how == "auto" else [])]
        command = [sys.executable, "-m", "tests.programs.program", str(path), str(self.folder)]
        command.append("alone" if self.size == 1 else self.how)
        # Warnings are errors, and ranks that wait for different collectives get one soon.
        env = {"HVD_STRICT": "1", "HVD_MISMATCH_SECONDS": "5", "HVD_TIMEOUT_SECONDS": "120"}
        env |= {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/harness/start", "HVD_AUTO": "divided"}
        env["HVD_BUCKET_BYTES"] = "100"  # so that each program has several
        env["HVD_COMMITS"] = str(self.folder / "commits")
        with (self.folder / "output").open("wb") as file:
            self.process = subprocess.Popen(
                [*([] if self.size == 1 else launcher), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | env,
                start_new_session=True,
            )
        self.when = time.time()

    def is_over(self) -> bool:
        """Whether all programs have run; goes on after one that hangs."""
        has_ended = self.process.poll() is not None
        while self.left and all(p.exists() for p in self.paths(next(iter(self.left)))):
            self.left.pop(next(iter(self.left)))
            self.when = time.time()
        is_late = time.time() - self.when > LIMIT
        if self.left and (has_ended or is_late):
            ranks.end(self.process)
            printed = (self.folder / "output").read_text(errors="replace")[-1500:]
            name = next(iter(self.left))
            self.left.pop(name)
            self.died[name] = f"the job {'died' if has_ended else 'hung'}: {printed}"
            if self.left:
                self.begin()
        return not self.left and (has_ended or is_late)

    def paths(self, name: str) -> list[pathlib.Path]:
        several = 1 if self.how == "auto" else self.size
        return [self.folder / f"{name}.{rank}.npz" for rank in range(several)]

    def seen(self, name: str) -> list[Seen]:
        """What all ranks show."""
        if name in self.died:
            return [{"error": self.died[name]}]
        found = []
        for path in self.paths(name):
            with np.load(path) as file:
                found.append({key.replace("|", "/"): file[key] for key in file})
        return found


@contextlib.contextmanager
def ended(sizes: Iterable[int], specs: dict[str, Spec], how: str) -> Iterator[list[Job]]:
    """Jobs of these sizes that have run the programs."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(size, specs, pathlib.Path(folder), how) for size in sizes]
        try:
            while sum(job.is_over() for job in jobs) < len(jobs):
                time.sleep(0.1)
            yield jobs
        finally:
            for job in jobs:
                ranks.end(job.process)


def run(specs: dict[str, Spec], sizes: Iterable[int], how: str = "ranks") -> tuple[Told, Told]:
    """How programs differ from those of one process; and what proves nothing, and why not."""
    found: Told = {}
    nothing: Told = {}
    with ended([1, *sizes], specs, how) as (alone, *jobs):
        for name, spec in specs.items():
            (expected,) = alone.seen(name)
            if why := proves_nothing(expected):
                nothing[name] = [why]
                continue
            told = []
            for job in jobs:
                if not draw.can_run(spec, job.size):
                    continue
                seen = [of_rank for of_rank in job.seen(name) if of_rank]  # that had a part in it
                differ = differences(expected, seen[0], draw.rounding(spec))
                differ += between_ranks(seen, spec.get("average", True))
                told += [f"{job.size} ranks: {text}" for text in differ]
            if told:
                found[name] = told
    noisy = {}
    for name in found:
        noise = NOISE[draw.rounding(specs[name])]
        noisy |= {f"{name} {i}": {**specs[name], "noise": noise * i} for i in range(NOISY + 1)}
    with ended([1] if noisy else [], noisy, how) as jobs:
        for name in list(found):
            (usual,), *others = [jobs[0].seen(f"{name} {i}") for i in range(NOISY + 1)]
            precision = draw.rounding(specs[name])
            if any(differences(usual, other, precision, 0.5) for (other,) in others):
                nothing[name] = ["unstable", *found.pop(name)]
    return found, nothing


def shrink(spec: Spec, told: list[str], how: str) -> tuple[Spec, list[str]]:
    """The shortest program that still differs, and how."""
    sizes = sorted({int(text.split()[0]) for text in told})[:1]
    while True:
        shorter = {f"{i}": other for i, other in enumerate(draw.simpler(spec))}
        found, _ = run(shorter, sizes, how)
        if not found:
            return spec, told
        # As short as those together are, if that still differs.
        common = {k: v for k, v in spec.items() if all(shorter[n].get(k) == v for n in found)}
        both, _ = run({"both": draw.legal(common)}, sizes, how) if len(found) > 1 else ({}, {})
        shortest = min(found, key=lambda name: len(json.dumps(shorter[name])))
        spec, told = shorter[shortest], found[shortest]
        if both:
            spec, told = draw.legal(common), both["both"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks (default: 2,3)")
    parser.add_argument("--auto", action="store_true", help="by hvdrun --auto, with no own lines")
    parser.add_argument("--pairs", action="store_true", help="without those that have no new pair")
    parser.add_argument("--as-drawn", action="store_true", help="do not shorten what differs")
    given = parser.parse_args()
    sizes, how = [*map(int, given.ranks.split(","))], "auto" if given.auto else "ranks"
    counts: collections.Counter[str] = collections.Counter()
    seeds: Sequence[int] = range(given.first, given.first + given.seeds)
    if given.pairs:
        seeds = draw.covering(seeds)
        print(f"{len(seeds)} programs", flush=True)
    for first in range(0, len(seeds), TOGETHER):
        specs = {f"{seed}": draw.draw(seed) for seed in seeds[first : first + TOGETHER]}
        if given.auto:
            specs = {
                name: draw.legal(
                    {k: v for k, v in spec.items() if k not in OF_HVD and v != "tfrecord"}
                )
                for name, spec in specs.items()
            }
        found, nothing = run(specs, sizes, how)
        counts += {"programs": len(specs), "differ": len(found), "prove nothing": len(nothing)}
        for name, why in nothing.items():
            print(f"seed {name} proves nothing: {' '.join(why)[:200]}", flush=True)
        for name, told in found.items():
            print(f"seed {name} differs: {told[0][:300]}", flush=True)
            short = specs[name]
            if not given.as_drawn:
                short, told = shrink(short, told, how)
            print(
                f"  {json.dumps(short)}", *(text[:500] for text in told[:6]), sep="\n  ", flush=True
            )
        print(f"until seed {[*specs][-1]}: {dict(counts)}", flush=True)
    # Some programs diverge alone; if many do, the generator is broken.
    return int(counts["differ"] > 0 or 5 * counts["prove nothing"] > counts["programs"])


if __name__ == "__main__":
    from tests import conftest  # noqa: F401 (one thread, and no GPU)

    sys.exit(main())
