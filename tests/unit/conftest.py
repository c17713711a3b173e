"""Fixtures of the unit tests."""

import os
import signal

import pytest

from tests.harness.launcher import Launcher


@pytest.fixture
def hvdrun(tmp_path):
    """A launcher; afterwards no process and no file of its jobs may be left."""
    launcher = Launcher(tmp_path)
    yield launcher
    for watchdog in launcher.watchdogs:
        watchdog.cancel()
    left = launcher.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}
    assert list(launcher.temporary.iterdir()) == []
