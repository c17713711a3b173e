"""Process options of Linux, and signals at the death of the parent."""

from __future__ import annotations

import ctypes
import os
import signal

# Seconds from the request to end until the kill: enough to flush and close files.
GRACE = 5.0

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set one of Linux's per-process options."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process get a signal when `parent` dies, at once if it is dead."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the option was set
        os.kill(os.getpid(), number)
