"""Training on three hosts under random faults."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.hosts import missing


@pytest.mark.slow
def test_two_minutes_of_random_faults() -> None:
    """A short `make soak`."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    soak = [sys.executable, "-m", "tests.harness.soak", "--minutes", "2"]
    done = subprocess.run(soak, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same weights as undisturbed, and nothing is left\n")
