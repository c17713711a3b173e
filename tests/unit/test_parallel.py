"""Runs tests/parallel on several ranks: one job per size, because TensorFlow starts slowly."""

import pathlib
import re
import sys

import pytest

from tests.harness import ranks

ROOT = pathlib.Path(__file__).parents[2]
PARALLEL = ROOT / "tests" / "parallel"


# Nearly all tests run on 2 ranks. To save minutes, only tests that depend on the number of ranks
# also run on 1 and 3 ranks, and on 4 ranks those whose order XLA could change.
LEFT_OUT = {
    1: [
        "combinations",
        "fuzz",
        "metrics",
        "observe",
        "options",
        "preprocessing",
        "progress",
        "restart",
        "together",
        "training",
        "unbuilt",
        "xla",
    ],
    2: ["combinations"],
    3: [
        "callbacks",
        "fit",
        "keras_callbacks",
        "metrics",
        "observe",
        "options",
        "preprocessing",
        "progress",
        "restart",
        "unbuilt",
        "xla",
    ],
}
TABLES = {2: "matrix.md", 3: "combinations.md"}
MATRIX = "test_training.py::test_every_optimizer_with_every_option"


def chosen(size: int) -> list[str]:
    """Returns the arguments that select the tests for this number of ranks."""
    if size == 4:
        return [str(PARALLEL / "ops" / "test_xla.py"), "-k", "60-1 or convolution"]
    ignored = [
        f"--ignore={file}"
        for file in PARALLEL.rglob("test_*.py")
        if file.stem.removeprefix("test_") in LEFT_OUT[size]
    ]
    deselected = [] if size == 2 else ["--deselect", f"tests/parallel/{MATRIX}"]
    return [str(PARALLEL), *ignored, *deselected]


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parallel(size: int, tmp_path: pathlib.Path) -> None:
    matrix = tmp_path / "matrix.md"
    job = ranks.mpirun(
        size,
        sys.executable,
        *("-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider", *chosen(size)),
        *("-p", "tests.harness.matrix", "--matrix", str(matrix)),
        # A hanging rank shows where and ends the job; every test takes much less.
        *("--timeout=120", "--timeout-method=thread"),
        timeout=1800,  # several times what it takes on an idle machine
        env={"HVD_TEST_PARALLEL": "1"},
    )
    assert job.status == 0, job.output
    passed = re.findall(r"(\d+) passed", job.output)
    assert len(passed) == size, job.output
    assert len(set(passed)) == 1, job.output
    if size in TABLES:
        table = ROOT / "docs" / TABLES[size]
        assert matrix.read_text() == table.read_text(), (
            f"{table} is old: see tests/harness/matrix.py"
        )
    print(f"{passed[0]} tests passed on {size} ranks")
