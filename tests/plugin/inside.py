"""Runs tests/parallel on the ranks of a job: all ranks run all tests in the same order.

The first failure on any rank ends the job. If ``HVD_TEST_PARALLEL`` names a folder, each rank
writes what it has run to a file there, for outside.py; any other value only runs the tests.
"""

import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import missing_calls, model_ranks
from hvd_keras.runtime import agree, libraries, log, process_sets, settings

settings.warn_only()  # fits without all lines, of other features' tests; jobs/ tests the errors
hvd.init()
_FOLDER = pathlib.Path(os.environ["HVD_TEST_PARALLEL"])


@pytest.fixture
def directory():
    """One temporary directory for all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        yield pathlib.Path(agree.gather_json("directory", mine)[0])
        agree.gather_json("directory is no longer used", None)


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    """What this rank warns of, as often as it does."""
    texts: list[str] = []
    monkeypatch.setattr(log, "warn_once", texts.append)
    return texts


@pytest.fixture(autouse=True)
def no_process_set_is_left() -> Iterator[None]:
    yield
    for added in process_sets.added()[1:]:  # but that of all ranks
        hvd.remove_process_set(added)


@pytest.fixture(autouse=True)
def horovods_names(request, monkeypatch) -> None:
    """Collecting test_horovod.py imports Horovod's names; to other tests they are not in use."""
    is_horovods = request.path.stem == "test_horovod"
    monkeypatch.setattr(missing_calls, "first_steps_are_local", is_horovods)
    monkeypatch.setattr(model_ranks, "averages_rows", not is_horovods)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--fuzz-cases",
        type=int,
        default=60,
        metavar="N",
        help="random collectives in test_fuzz.py (default: %(default)s)",
    )


def pytest_report_header() -> str:
    return f"rank {hvd.rank()} of {hvd.size()}"


def pytest_collection_modifyitems(config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are for other numbers of ranks, or not for GPUs."""
    if tf.config.get_visible_devices("GPU"):
        for item in items:
            for mark in item.iter_markers("host"):
                item.add_marker(pytest.mark.skip(reason=f"not on a GPU: {mark.args[0]}"))
    if _FOLDER.is_dir():
        left_out = [i for i in items if hvd.size() not in _sizes(i)]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _sizes(item: pytest.Item) -> tuple[int, ...]:
    mark = item.get_closest_marker("ranks")
    return mark.args if mark else (2,)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """Say when the last case of a test has run."""
    result = yield
    if nextitem is None or _key(nextitem.nodeid) != _key(item.nodeid):
        _write({"done": _key(item.nodeid)})
    return result


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or not report.passed:
        text = report.longreprtext
        if report.skipped:
            text = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            text = f"rank {hvd.rank()} failed in {report.nodeid}:\n{text}\n"
        _write({"key": _key(report.nodeid), "outcome": report.outcome, "text": text})
    if report.failed:
        # The others may be waiting for this rank, so end the whole job.
        sys.stdout.flush()
        sys.stderr.write(f"\n{text}")
        sys.stderr.flush()
        libraries.core().hvd_abort(1)


def _key(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _write(line: dict[str, str]) -> None:
    if _FOLDER.is_dir():
        with (_FOLDER / f"rank-{hvd.rank()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
