"""The interface that ssh and srun share: run a command on another host."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from hvd_keras.launch.start.hosts import is_here


class Reach(Protocol):
    """Runs commands on other hosts."""

    def start(self, host: str | None, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a host (None: this host) with pipes for stdin, stdout and stderr."""

    def failure(self, status: int, err: str) -> str | None:
        """Return why the host could not be reached, or None if the command itself failed."""


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command with pipes for stdin, stdout and stderr."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for hvdrun alone
    )


def run_on_all(
    names: Iterable[str], reach: Reach, command: Sequence[str], text: str, seconds: float
) -> dict[str, subprocess.CompletedProcess[str] | None]:
    """Run a command with this input on all hosts at once; a result is None after `seconds`."""
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
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["no output"])[-1]
