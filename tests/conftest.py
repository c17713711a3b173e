"""Settings of all tests."""

import collections
import importlib
import os
import pathlib
import re
import signal
from collections.abc import Iterator

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
    # XLA, which Keras uses by default, compiles quickly; the tests compare results, not times.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "HVD_STALL_WARNING_SECONDS": "10",
    "PYTHONPATH": str(pathlib.Path(__file__).parent / "harness" / "start"),
}.items():
    os.environ.setdefault(name, value)

# Compiled once, and not by each rank of each job.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("PYTHONUNBUFFERED", None)  # few users have it

# Half of the time in which pytest finds the tests, in each of its processes, went into imports.
if "HVD_TEST_PARALLEL" not in os.environ:
    importlib.import_module("tests.harness.start.sitecustomize")

# A shell that runs the tests in the background, and nohup, ignore these; jobs would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What takes a minute or more runs first, so that none of it runs alone at the end.
LONG = ["2-ranks", "test_core.py", "2-ranks in folders", "test_auto.py", "test_programs.py"]
LONG += ["test_slurm.py", "test_hvdrun_ends.py", "test_several_hosts.py", "test_hvdrun.py"]
LONG += ["test_faults.py"]
LONG += ["test_examples.py", "test_hvdrun_plan.py", "test_horovod.py", "test_restarts.py"]
LONG += ["test_runtime.py", "test_restart.py", "test_soak.py", "test_mpi_faults.py"]
LONG += [f"{size}-ranks{where}" for size in (3, 1, 4) for where in ("", " in folders")]


def _scope(nodeid: str) -> str:
    """The tests of one scope run one after the other: a file, or one job of tests/parallel."""
    file, ranks = nodeid.partition("::")[0], re.search(r"\[(\d-ranks)\]$", nodeid)
    return ranks[1] + " in folders" * (file.count("/") > 2) if ranks else file


def pytest_collection_modifyitems(config, items: list[pytest.Item]) -> None:
    """Leave out most cases of tests that are marked so, and sort the tests."""
    if config.option.markexpr == "not slow":
        left_out = {item for group in _cases(items) for item in group}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    if "HVD_TEST_PARALLEL" in os.environ:
        return  # a job runs its tests in the order in which they are waited for
    scopes = [*LONG, *dict.fromkeys(_scope(item.nodeid) for item in items)]
    names = [pathlib.Path(scope).name for scope in scopes]
    items.sort(key=lambda item: names.index(pathlib.Path(_scope(item.nodeid)).name))


def _cases(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """For each test with ``pytest.mark.cases(n)``, all but n of its cases, which lie far apart."""
    tests = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        number = cases[0].get_closest_marker("cases").args[0]
        kept = {(2 * i + 1) * len(cases) // (2 * number) for i in range(number)}
        yield [case for i, case in enumerate(cases) if i not in kept]


class _Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


def pytest_xdist_make_scheduler(config, log) -> LoadScopeScheduling:
    """Let each worker run whole scopes."""
    return _Scheduling(config, log)


@pytest.fixture
def hvdrun(tmp_path, request):
    """Yields a launcher; afterwards no process or file of its jobs may be left."""
    launcher = Launcher(tmp_path)
    launcher.forks = request.path.parent.name == "jobs"
    yield launcher
    for watchdog in launcher.watchdogs:
        watchdog.cancel()
    left = launcher.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}
    assert list(launcher.temporary.iterdir()) == []
