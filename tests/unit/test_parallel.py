"""Runs tests/parallel on several ranks: one job per size, because TensorFlow starts slowly."""

import pathlib
import re
import sys

import pytest

from tests.harness import ranks

ROOT = pathlib.Path(__file__).parents[2]
PARALLEL = ROOT / "tests" / "parallel"


# Nearly all tests run on 2 ranks. To save minutes, only tests that depend on the number of ranks
# also run on 1 and 3 ranks, and on 4 ranks those whose order XLA could change, and of tables.
LEFT_OUT = {
    1: [
        "combinations",
        "edges",
        "embeddings",
        "fuzz",
        "metrics",
        "observe",
        "options",
        "preprocessing",
        "progress",
        "restart",
        "shard_state",
        "shard_state_in_files",
        "sparse",
        "tables_in_files",
        "together",
        "training",
        "unbuilt",
        "xla",
    ],
    2: ["combinations"],
    3: [
        "callbacks",
        "edges",
        "fit",
        "keras_callbacks",
        "metrics",
        "observe",
        "options",
        "preprocessing",
        "progress",
        "restart",
        "shard_state_in_files",
        "sparse",
        "tables_in_files",
        "unbuilt",
        "xla",
    ],
}
# What only these tests take minutes for, on 2 ranks.
SLOW = [
    "tests/parallel/test_training.py::test_every_optimizer_with_every_option",
    "tests/parallel/test_shard_state.py::test_shares_of_every_optimizer_with_every_option",
    "tests/parallel/test_shard_state_in_files.py::test_an_interrupted_training_goes_on[True-False]",
    "tests/parallel/test_shard_state_in_files.py::test_an_interrupted_training_goes_on[False-True]",
    "tests/parallel/test_embeddings.py::test_optimizers[momentum]",
    "tests/parallel/test_embeddings.py::test_optimizers[AdamW]",
    "tests/parallel/test_embeddings.py::test_combiners[sum-False]",
    "tests/parallel/ops/test_xla.py::test_many_tensors_and_steps[500-20]",
]
# These run on 4 ranks, where more can go wrong, and not on 2.
ON_FOUR = [
    "tests/parallel/ops/test_xla.py::test_many_tensors_and_steps[60-1]",
    "tests/parallel/ops/test_xla.py::test_convolution_and_batch_norm",
]
TABLES = {(2, True): "matrix.md", (3, False): "combinations.md"}


def chosen(size: int, slow: bool = False) -> list[str]:
    """The arguments that say which tests run on so many ranks."""
    if slow:
        return [str(ROOT / test) for test in SLOW]
    if size == 4:
        names = ("ops/test_xla.py", "test_embeddings.py", "test_tables_in_files.py")
        names += ("test_shard_state.py", "test_shard_state_in_files.py")
        tests = "60-1 or convolution or many_tables or other_numbers"
        tests += " or (shares and not every_option) or one_variable or nth"
        return [*(str(PARALLEL / name) for name in names), "-k", tests]
    ignored = [
        f"--ignore={file}"
        for file in PARALLEL.rglob("test_*.py")
        if file.stem.removeprefix("test_") in LEFT_OUT[size]
    ]
    return [str(PARALLEL), *ignored, *(f"--deselect={test}" for test in (*SLOW, *ON_FOUR))]


@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    ("size", "slow"),
    [
        *(pytest.param(size, False, id=str(size)) for size in (1, 2, 3, 4)),
        pytest.param(2, True, marks=pytest.mark.slow, id="2-slow"),
    ],
)
def test_parallel(size: int, slow: bool, tmp_path: pathlib.Path) -> None:
    matrix = tmp_path / "matrix.md"
    job = ranks.mpirun(
        size,
        sys.executable,
        *("-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider"),
        *chosen(size, slow),
        *("-p", "tests.harness.matrix", "--matrix", str(matrix)),
        # A rank that hangs shows where, and ends the job. No test takes nearly as long.
        *("--timeout=120", "--timeout-method=thread"),
        timeout=1800,  # several times what it takes on an idle machine
        env={"HVD_TEST_PARALLEL": "1"},
    )
    assert job.status == 0, job.output
    passed = re.findall(r"(\d+) passed", job.output)
    assert len(passed) == size, job.output
    assert len(set(passed)) == 1, job.output
    if (size, slow) in TABLES:
        table = ROOT / "docs" / TABLES[size, slow]
        assert matrix.read_text() == table.read_text(), (
            f"{table} is old: see tests/harness/matrix.py"
        )
    print(f"{passed[0]} tests passed on {size} ranks")
