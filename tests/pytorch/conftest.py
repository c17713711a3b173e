"""Scripts on PyTorch."""

import pytest

from tests.harness.launcher import Launcher

HEAD = """
import keras, numpy as np
import hvd_keras as hvd
hvd.init()
"""


@pytest.fixture
def hvdrun(hvdrun: Launcher) -> Launcher:
    """Runs scripts on PyTorch, which begin with HEAD."""
    hvdrun.environment["KERAS_BACKEND"] = "torch"
    hvdrun.head += HEAD
    return hvdrun
