"""How a process ends: with its parent, or soon after it was asked to."""

from __future__ import annotations

import ctypes
import os
import signal

# Seconds from the request to end until the kill: enough to flush and close files.
GRACE = 5.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process get a signal when `parent` dies, at once if it is dead."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
    if os.getppid() != parent:  # it died before the option was set
        os.kill(os.getpid(), number)
