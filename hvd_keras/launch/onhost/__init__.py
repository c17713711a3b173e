"""Code that runs on the hosts of a job, beside the ranks; it uses the standard library only."""

import sys
from pathlib import Path

# The status with which ssh itself fails, and what is called as ssh is.
FAILED = 255


def program(module: str) -> list[str]:
    """Return the command that runs `main` of a module of hvd_keras (see `__main__.py`)."""
    return [sys.executable, "-I", "-S", str(Path(__file__).parent), module]
