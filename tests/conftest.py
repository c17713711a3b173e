"""Settings of all tests."""

import os
import pathlib
import re
import signal

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.harness.launcher import Launcher

# No GPU and one thread per process: results do not depend on the machine, and ranks share it.
for name, value in {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HVD_STALL_WARNING_SECONDS": "10",
    "PYTHONPATH": str(pathlib.Path(__file__).parent / "harness" / "start"),
}.items():
    os.environ.setdefault(name, value)

# Compiled once, and not by each rank of each job.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that runs the tests in the background, and nohup, ignore these; jobs would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What takes minutes runs first, so that none of it runs alone at the end.
LONG = ["2-ranks", "test_soak.py", "3-ranks", "test_core.py", "test_faults.py", "1-ranks"]
LONG += ["test_restarts.py", "test_forgotten.py", "test_examples.py", "4-ranks"]


def _scope(nodeid: str) -> str:
    """The tests of one scope run one after the other: a file, or one job of tests/parallel."""
    ranks = re.search(r"\[(\d-ranks)\]$", nodeid)
    return ranks[1] if ranks else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests."""
    scopes = [*LONG, *dict.fromkeys(_scope(item.nodeid) for item in items)]
    names = [pathlib.Path(scope).name for scope in scopes]
    items.sort(key=lambda item: names.index(pathlib.Path(_scope(item.nodeid)).name))


class _Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


def pytest_xdist_make_scheduler(config, log) -> LoadScopeScheduling:
    """Let each worker run whole scopes."""
    return _Scheduling(config, log)


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
