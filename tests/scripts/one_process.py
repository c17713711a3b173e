"""Runs the scripts of this folder as scripts of one process: alone, and by ``hvdrun --auto``.

    python tests/scripts/one_process.py [--ranks 2,3] [NAME...]

The form for one process has no hvd_keras: ``hvd.rank()`` is 0, ``hvd.size()`` 1, and what
distributes an optimizer, a tape or data is left out. Both runs must save the same arrays and print
the same numbers, to rounding; or --auto refuses the script with a line that says what to change.
"whole": the first rank has computed some of it alone, which --auto says.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import driver  # noqa: E402

# Names of hvd_keras that are their first argument on one process, those that are numbers, and those
# that do nothing.
SAME = {"DistributedOptimizer", "DistributedGradientTape", "broadcast", "allreduce", "data.shard"}
SAME |= {"linear_scaling", "sqrt_scaling", "PartialDistributedOptimizer"}
NUMBERS = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1}
NOTHING = {"init", "shutdown", "broadcast_variables", "barrier", "join"}
REFUSED = re.compile(
    r"Error: (hvdrun --auto|keras|fit)|failed: \[hvdrun --auto|^hvd_keras: |a \w+ is in"
)


class Alone(ast.NodeTransformer):
    """Makes the form for one process of a script; ``unknown`` are names that have none."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return None if node.names[0].name == "hvd_keras" else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        name = isinstance(node.value, ast.Call) and ast.unparse(node.value.func)
        if name and name.removeprefix("hvd.") in NOTHING and name.startswith("hvd."):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if not name.startswith("hvd."):
            return node
        name = name.removeprefix("hvd.")
        if name in NUMBERS:
            return ast.Constant(NUMBERS[name])
        if name == "data.shard":
            return self.batched(node)
        if name in SAME and node.args:
            return node.args[0]
        if name == "load_model":
            return ast.parse(f"keras.models.load_model({ast.unparse(node.args[0])})").body[0].value
        if name.startswith("callbacks.") and name != "callbacks.Checkpoint":
            return ast.parse("__import__('keras').callbacks.Callback()").body[0].value
        self.unknown.add(name)
        return node

    def batched(self, node: ast.Call) -> ast.AST:
        """The batches of a source of hvd.data.shard."""
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        source = ast.unparse(node.args[0])
        if "batch_size" not in options or options.get("shuffle") not in (None, "False"):
            self.unknown.add("data.shard")
            return node
        text = f"tf.data.Dataset.from_tensor_slices({source})" if source[0] == "(" else source
        return ast.parse(f"{text}.batch({options['batch_size']})").body[0].value


def one_process(source: str) -> str:
    """Return the form for one process; ValueError if there is none."""
    tree, alone = ast.parse(source), Alone()
    tree = ast.fix_missing_locations(alone.visit(tree))
    text = ast.unparse(tree)
    if alone.unknown or "hvd" in text.partition('"""')[2].partition('"""')[2]:
        raise ValueError(f"needs hvd_keras: {', '.join(sorted(alone.unknown)) or 'in other ways'}")
    if "tf.data" in text and "import tensorflow" not in text:
        text = text.replace("import keras\n", "import keras\nimport tensorflow as tf\n", 1)
    return text


class Run:
    """A finished run of a script of one process; ``ranks`` 0: without hvdrun."""

    def __init__(self, script: driver.Script, text: str, folder: str, ranks: int) -> None:
        self.folder = Path(folder)
        (self.folder / "results").mkdir(parents=True)
        path = self.folder / f"{script.name}.py"
        path.write_text(text)
        command = [sys.executable, str(path)]
        if ranks:
            hvdrun = [sys.executable, "-m", "hvd_keras.hvdrun", "--auto", "--no-prefix", "-np"]
            command = [*hvdrun, str(ranks), "--oversubscribe", *command]
        usual = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
        usual |= {"TF_NUM_INTRAOP_THREADS": "1", "RESULT": "results", "HVD_AUTO": "divided"}
        usual["PYTHONPATH"] = str(driver.ROOT / "tests" / "harness" / "start")
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | usual,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=driver.LIMIT,
        )
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    def arrays(self) -> list[np.ndarray]:
        """All arrays that it has saved."""
        paths = sorted((self.folder / "results").iterdir())
        return [array for path in paths for array in np.load(path).values()]

    def files(self) -> set[str]:
        """The files that it has left."""
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*"))
        return {re.sub(r"\d{5,}\S*", "", str(p)) for p in found if "__pycache__" not in str(p)}

    def numbers(self) -> list[float]:
        """All numbers that it has printed, but for times."""
        text = re.sub(r"\d+m?s(/step|/epoch)?\b|\d+us/step|\d+:\d+", "", self.out)
        return [float(found) for found in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)]


def same(one: Run, other: Run) -> bool:
    """Whether two runs have saved the same arrays."""
    pairs = zip(one.arrays(), other.arrays(), strict=True)
    return all(a.shape == b.shape and np.allclose(a, b, equal_nan=True) for a, b in pairs)


def compare(script: driver.Script, sizes: list[int]) -> Iterator[str]:
    """Yield how a script fares on each number of ranks, such as "same" or "refused: ..."."""
    try:
        text = one_process(script.path.read_text())
    except ValueError as error:
        yield f"no form: {error}"
        return
    with tempfile.TemporaryDirectory() as folder:
        alone = Run(script, text, f"{folder}/alone", 0)
        if alone.status:
            yield f"no form: fails alone: {driver.tail(alone.err, 1)}"
            return
        for size in sizes:
            together = Run(script, text, f"{folder}/{size}", size)
            told = fares(alone, together, text)
            if told.startswith("DIFFERS"):
                again = Run(script, text, f"{folder}/again-{size}", 0)
                if not same(alone, again):
                    yield "no form: alone it has other results in each run"
                    return
            yield f"{size} ranks: {told}"


def fares(alone: Run, together: Run, text: str) -> str:
    """Return how a run fares: "same", "refused: ..." or "DIFFERS: ..."."""
    if together.status:
        lines = [line.strip() for line in together.err.splitlines() if REFUSED.search(line)]
        return f"refused: {lines[-1][:300]}" if lines else f"FAILED: {driver.tail(together.err)}"
    if alone.files() != together.files():
        return f"DIFFERS: files {alone.files() ^ together.files()}"
    pairs = list(zip(alone.arrays(), together.arrays(), strict=True))
    pairs.append((np.array(alone.numbers()), np.array(together.numbers())))
    # Each rank rounds the gradients of its rows to half precision. One process that computes those
    # of the same halves of its batches ends with the bits of 2 ranks, in mixed_bfloat16 up to 0.018
    # from where it ends with whole batches; with rows in another order, up to 0.012. float16 rounds
    # eight times as finely.
    rough = (
        (0.05, 0.02) if "bfloat16" in text else (0.01, 5e-3) if "mixed_" in text else (1e-3, 1e-4)
    )
    for number, (mine, theirs) in enumerate(pairs):
        is_close = mine.shape == theirs.shape
        if not (is_close and np.allclose(mine, theirs, *rough, equal_nan=True)):
            return f"DIFFERS: array {number}: {mine.ravel()[:3]}, {theirs.ravel()[:3]}"
    return "same" + ", whole" * ("on the first rank alone" in together.err)


def main() -> int:
    """Runs scripts one by one and prints how they fare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2", help="numbers of ranks (default: 2)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    given, bad = parser.parse_args(), 0
    sizes = list(map(int, given.ranks.split(",")))
    for script in driver.scripts(given.names):
        missing = script.missing()
        lines = [f"skipped: needs {missing}"] if missing else compare(script, sizes)
        for told in lines:
            bad += "DIFFERS" in told or "FAILED" in told
            print(f"{script.path.parent.name}/{script.name:32} {told}", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
