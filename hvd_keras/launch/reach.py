"""How commands reach other hosts: what ssh and srun have in common."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Protocol


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


def last_line(text: str) -> str:
    """The last line that a program has said."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]
