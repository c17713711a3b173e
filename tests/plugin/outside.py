"""Makes every test of tests/parallel one pytest item for each number of ranks it runs on.

TensorFlow starts slowly, so one job per number of ranks runs all items of that number that lie in
tests/parallel itself, and another one those in its folders. The items are found in the source text:
importing a test module would need ``hvd.init()``. The ranks write what happens to files (see
inside.py), and each item waits here for its part. A test that fails ends its job, because the other
ranks may be waiting; the next item starts a new job with the rest.
"""

import ast
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

from tests.harness import ranks

ROOT = pathlib.Path(__file__).parents[2]


class ParallelFile(pytest.File):
    """One file of tests/parallel."""

    def collect(self) -> Iterator[pytest.Item]:
        module = ast.parse(self.path.read_text())
        default = _sizes(n for n in module.body if isinstance(n, ast.Assign)) or [2]
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                sizes = _sizes(node.decorator_list) or default
                for size in sizes:
                    item = ParallelItem.from_parent(
                        self, name=f"{node.name}[{size}-ranks]", test=node.name, size=size
                    )
                    marks = set(map(ast.unparse, node.decorator_list))
                    # make test runs each test on one number of ranks, make test-all on all.
                    if "pytest.mark.slow" in marks or (size != 2 and 2 in sizes):
                        item.add_marker("slow")
                    item.line = node.lineno - 1
                    yield item


class ParallelItem(pytest.Item):
    """One test function, with all its parameters, on one number of ranks."""

    line = 0

    def __init__(self, *, test: str, size: int, **more: object) -> None:
        super().__init__(**more)
        self.test, self.size = test, size
        self.job = size, self.path.parent.name == "parallel"
        self.key = f"{self.path.relative_to(ROOT)}::{test}"

    def runtest(self) -> None:
        job = _jobs.get(self.job)
        if job is None or job.is_over():
            same = [i for i in self.session.items if getattr(i, "job", None) == self.job]
            job = _jobs[self.job] = _Job(same[same.index(self) :])
        job.report(self)

    def repr_failure(self, error, style=None) -> str:
        if isinstance(error.value, _RanksFailedError):
            return str(error.value)
        return super().repr_failure(error, style)

    def reportinfo(self) -> tuple[pathlib.Path, int, str]:
        return self.path, self.line, self.name


class _RanksFailedError(Exception):
    """What the ranks have printed about a test."""


class _Job:
    """A job that runs the given items, which have the same number of ranks."""

    def __init__(self, items: list[ParallelItem]) -> None:
        self._last = items[-1]
        self._size = items[0].size
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = pathlib.Path(self._temporary.name)
        arguments = self._folder / "arguments"
        arguments.write_text("".join(f"{item.key}\n" for item in items))
        # Inside, -m slow would leave out what is slow for its number of ranks alone.
        usual = items[0].config.option.markexpr == "not slow"
        self._output = self._folder / "output"
        self._lines: list[list[dict[str, str]]] = [[] for _ in range(self._size)]
        self._read_to = [0] * self._size
        self._process = ranks.start(
            self._size,
            *(sys.executable, "-m", "pytest", f"@{arguments}"),
            *("-m", "not slow" if usual else "", "-q", "--color=no", "-p", "no:cacheprovider"),
            # A rank that hangs shows where, and ends the job. No test takes nearly as long.
            *("--timeout=1500", "--timeout-method=thread"),
            output=self._output,
            env={"HVD_TEST_PARALLEL": str(self._folder)},
        )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def report(self, item: ParallelItem) -> None:
        """Wait until all ranks have run an item; raise what they found."""
        try:
            cases = self._wait_for(item)
            if item is self._last:
                ranks.finish(self._process, 1500)  # 10 s of work, on a machine that others use
        except BaseException:
            ranks.end(self._process)
            raise
        lines = [line for case in cases for line in case]
        failed = [line["text"] for line in lines if line["outcome"] == "failed"]
        # A rank that failed has ended the job, so the others have not run all cases.
        if not failed and (
            len({len(case) for case in cases}) > 1
            or (self.is_over() and (self._process.returncode or item is not self._last))
        ):
            printed = self._output.read_text(errors="replace")[-20000:]
            failed = [f"the job ended with exit status {self._process.returncode}:\n{printed}"]
        if failed:
            ranks.end(self._process)
            raise _RanksFailedError("\n".join(failed))
        if not lines:
            raise _RanksFailedError(f"no case of {item.name} has run")
        if all(line["outcome"] == "skipped" for line in lines):
            pytest.skip(lines[0]["text"])

    def _wait_for(self, item: ParallelItem) -> list[list[dict[str, str]]]:
        """The reports about an item, by rank; of all ranks, unless the job has ended."""
        while True:
            over = self.is_over()
            for rank, lines in enumerate(self._lines):
                self._read(rank, lines)
            if over or all({"done": item.key} in lines for lines in self._lines):
                return [
                    [line for line in lines if line.get("key") == item.key] for lines in self._lines
                ]
            time.sleep(0.05)

    def _read(self, rank: int, lines: list[dict[str, str]]) -> None:
        """Add what a rank has written since."""
        path = self._folder / f"rank-{rank}"
        if path.exists():
            with path.open() as file:
                file.seek(self._read_to[rank])
                while (line := file.readline()).endswith("\n"):
                    lines.append(json.loads(line))
                    self._read_to[rank] = file.tell()


_jobs: dict[tuple[int, bool], _Job] = {}


def _sizes(nodes) -> list[int]:
    """The numbers of ranks of all ``pytest.mark.ranks(…)`` in these parts of a source text."""
    return sorted(
        {
            argument.value
            for node in nodes
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.ranks"
            for argument in call.args
        }
    )


def pytest_pycollect_makemodule(module_path: pathlib.Path, parent) -> ParallelFile:
    """Collect a file without importing it."""
    return ParallelFile.from_parent(parent, path=module_path)


def pytest_unconfigure() -> None:
    """End jobs that an interrupted session has left."""
    for job in _jobs.values():
        ranks.end(job._process)
