"""Settings of all tests."""

import os
import signal
from pathlib import Path

import pytest

from tests.harness.launcher import Launcher

# No GPU and one thread per process: results do not depend on the machine, and ranks share it.
for name, value in {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HVD_STALL_WARNING_SECONDS": "10",
    "PYTHONPATH": str(Path(__file__).parent / "harness" / "start"),
}.items():
    os.environ.setdefault(name, value)

# A shell that runs the tests in the background ignores it, and jobs would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests in parallel/ are run by all ranks of a job at once; unit/test_parallel.py starts such jobs.
collect_ignore = [] if "HVD_TEST_PARALLEL" in os.environ else ["parallel"]

# Files that take minutes run first, so that none of them runs alone at the end. Without an option
# in the Makefile, xdist would start with the files that have the most tests.
LONG = ["test_parallel.py", "test_soak.py", "test_core.py", "test_faults.py", "test_restarts.py"]
LONG += ["test_forgotten.py", "test_examples.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests."""
    items.sort(key=lambda item: [*LONG, item.path.name].index(item.path.name))


@pytest.fixture
def hvdrun(tmp_path):
    """Yields a launcher; afterwards no process or file of its jobs may be left."""
    launcher = Launcher(tmp_path)
    yield launcher
    for watchdog in launcher.watchdogs:
        watchdog.cancel()
    left = launcher.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}
    assert list(launcher.temporary.iterdir()) == []
