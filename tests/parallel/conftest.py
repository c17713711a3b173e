"""All ranks run all tests in the same order; the first failure on any rank ends the job."""

import pathlib
import sys
import tempfile

import pytest

import hvd_keras as hvd
from hvd_keras import _library, agree

hvd.init()


@pytest.fixture
def directory():
    """One temporary directory for all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        yield pathlib.Path(agree.gather_json("directory", mine)[0])
        agree.gather_json("directory is no longer used", None)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--fuzz-cases",
        type=int,
        default=1000,
        metavar="N",
        help="random collectives in test_fuzz.py (default: %(default)s)",
    )


def pytest_report_header() -> str:
    return f"rank {hvd.rank()} of {hvd.size()}"


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        # The others may be waiting for this rank, so end the whole job.
        sys.stdout.flush()
        sys.stderr.write(f"\nrank {hvd.rank()} failed in {report.nodeid}:\n{report.longreprtext}\n")
        sys.stderr.flush()
        _library.core().hvd_abort(1)
