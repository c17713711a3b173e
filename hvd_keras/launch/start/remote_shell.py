"""How commands reach other hosts: what ssh and srun have in common."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from hvd_keras.launch.start.hosts import is_here


class Reach(Protocol):
    """A way to other hosts."""

    def start(self, host: str | None, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a host, or here if that is None, with pipes to all its streams."""

    def failure(self, status: int, err: str) -> str | None:
        """Why a host cannot be reached, from the end of such a command; None if it was reached."""


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command of ours, with pipes to all its streams."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a Ctrl-C is hvdrun's own affair
    )


def run_on_all(
    names: Iterable[str], reach: Reach, command: Sequence[str], text: str, seconds: float
) -> dict[str, subprocess.CompletedProcess[str] | None]:
    """Run a command with this input on all hosts at once; None for one that takes longer."""
    running = {name: reach.start(None if is_here(name) else name, command) for name in names}
    limit = time.monotonic() + seconds
    done: dict[str, subprocess.CompletedProcess[str] | None] = {}
    for name, process in running.items():
        try:
            out, err = process.communicate(text, timeout=max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            done[name] = None
        else:
            done[name] = subprocess.CompletedProcess(command, process.returncode, out, err)
    return done


def last_line(text: str) -> str:
    """The last line that a program has said."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]
