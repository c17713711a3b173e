"""Runs ordinary Keras scripts as users run them: with one process, and with two ranks.

    python tests/scripts/driver.py [NAME...]

Each script is one file in a folder beside this one. Its docstring contains, one per line:

    expect: equal         2 ranks end with the arrays of one process, to rounding
            differ-ok     the result is not defined (for example, random numbers differ by rank)
            error "text"  2 ranks fail, and the output of each ends with a text that contains this
    needs:  modules without which it is skipped
    fast:   yes           the test suite runs it

A script saves its arrays, usually weights, to the folder $RESULT, one file per rank; those of all
ranks must be equal bit for bit. No run may print an unexpected traceback, or a line of hvd_keras or
hvdrun.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 900  # seconds, against hangs alone; a run takes ten on an idle machine
KEYS = ("expect", "needs", "fast")


class Script:
    """A script and the declarations in its docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        said = dict(line.split(": ", 1) for line in lines if line.split(": ", 1)[0] in KEYS)
        self.expect, _, text = said["expect"].partition(" ")
        if self.expect not in ("equal", "differ-ok", "error"):
            raise ValueError(f"{path}: expect: {said['expect']}")
        self.text = text.strip('"')
        self.needs = said.get("needs", "").split()
        self.fast = said.get("fast") == "yes"

    def missing(self) -> list[str]:
        """Returns the modules that it needs and that are missing."""
        return [name for name in self.needs if not PathFinder.find_spec(name)]

    def problems(self) -> list[str]:
        """Returns what is wrong with the script; empty if it behaves as expected."""
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            alone = Run(self, 1, one)
            found = alone.problems()
            together = Run(self, 2, two)
            if self.expect == "error":
                found += together.not_an_error(self.text)
            else:
                found += together.problems()
            if self.expect in ("equal", "differ-ok") and not found:
                found += differences(alone, together, self.expect == "equal")
        return found


class Run:
    """Runs a script to its end."""

    def __init__(self, script: Script, ranks: int, folder: str) -> None:
        command = [sys.executable, str(script.path)]
        environment = {"PYTHONPATH": str(ROOT / "tests" / "harness" / "start")}
        if ranks > 1:
            hvdrun = [sys.executable, "-m", "hvd_keras.hvdrun", "-np", str(ranks)]
            if not re.search(r"(import|from) (hvd_keras|horovod)", script.path.read_text()):
                hvdrun.append("--no-init")  # the script joins no job, as those of its tests
            command = [*hvdrun, "--oversubscribe", *command]
        self.results = Path(folder, "results")
        self.results.mkdir()
        usual = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # No GPU and one thread per process: sums do not depend on the machine.
        usual |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        usual |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
        usual |= {"OMP_NUM_THREADS": "1", "RESULT": str(self.results)}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=usual | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.status: int | str
        try:
            self.out, self.err = process.communicate(timeout=LIMIT)
            self.status = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # hvdrun ends its ranks
            self.out, self.err = process.communicate()
            self.status = f"none after {LIMIT} s"
        self.who = "alone" if ranks == 1 else f"{ranks} ranks"

    def ours(self) -> list[str]:
        """Returns the lines of stderr from hvd_keras or hvdrun, and warnings that name them."""
        lines = self.err.replace(str(ROOT), ".").splitlines()
        return [line for line in lines if re.search(r"hvd_keras|hvdrun:", line)]

    def problems(self) -> list[str]:
        """Returns what is wrong with a run that should succeed."""
        if self.status != 0 or "Traceback (most recent call last)" in self.err:
            return [f"{self.who}: exit status {self.status}\n{tail(self.err or self.out)}"]
        return [f"{self.who}: on stderr: {line}" for line in self.ours()]

    def not_an_error(self, text: str) -> list[str]:
        """Returns what is wrong with a run that should fail with this text."""
        if self.status == 0 or text not in self.err or isinstance(self.status, str):
            status = f"{self.who}: exit status {self.status}, expected an error with {text!r}"
            return [f"{status}\n{tail(self.err)}"]
        return []

    def arrays(self) -> list[list[np.ndarray]]:
        """Loads what each rank has saved."""
        return [list(np.load(path).values()) for path in sorted(self.results.iterdir())]


def differences(alone: Run, together: Run, compare: bool) -> list[str]:
    """Returns how two ranks differ from each other and from one process."""
    (one, *more), ranks = alone.arrays(), together.arrays()
    if more or len(ranks) != 2 or not one:
        return [f"results of {1 + len(more)} ranks alone, of {len(ranks)} of 2"]
    found = []
    for i, (mine, theirs) in enumerate(zip(*ranks, strict=True)):
        if mine.shape != theirs.shape or not np.array_equal(mine, theirs, equal_nan=True):
            found.append(f"array {i}: the ranks differ\n{mine.ravel()[:6]}\n{theirs.ravel()[:6]}")
    for i, (mine, theirs) in enumerate(zip(one, ranks[0], strict=True)):
        if not np.isfinite(mine).all():
            found.append(f"array {i}: is not finite")
        elif compare and not np.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
            worst = np.abs(mine - theirs).max()
            found.append(f"array {i}: 2 ranks differ from one process by {worst:.3g}, up to")
            found[-1] += f" {np.abs(mine).max():.3g} large"
    return found[:3]


def tail(text: str) -> str:
    """Returns the last lines of the output."""
    return "\n".join(text.rstrip().splitlines()[-12:])


def scripts(names: list[str] | None = None) -> list[Script]:
    """Returns all scripts, or those with these names, by folder and name."""
    found = [Script(path) for path in sorted(HERE.glob("*/*.py"))]
    if unknown := set(names or []) - {script.name for script in found}:
        raise SystemExit(f"no such script: {', '.join(sorted(unknown))}")
    return [script for script in found if not names or script.name in names]


def main() -> int:
    """Runs scripts one by one; prints a table and the failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    failed = {}
    for script in scripts(parser.parse_args().names):
        began, missing = time.monotonic(), script.missing()
        problems = [] if missing else script.problems()
        outcome = f"skipped: needs {' '.join(missing)}" if missing else script.expect
        if problems:
            outcome, failed[script.name] = f"FAILED ({script.expect})", problems
        seconds = time.monotonic() - began
        name = f"{script.path.parent.name}/{script.name}"
        print(f"{name:40} {seconds:5.0f} s  {outcome}", flush=True)
    for name, problems in failed.items():
        print(f"\n{name}\n  " + "\n".join(problems).replace("\n", "\n  "))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
