"""How other hosts are reached: ssh, without questions, with a sign of life when nothing moves."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_keras.launch.start import remote_shell as reach

# Seconds until a host that does not answer counts as unreachable.
CONNECT_TIMEOUT = 5

# Seconds between signs of life and how many may be missed, so that 5 s of a broken network are
# survived; hvdrun itself (`channel.SILENCE`) has noticed a longer one before.
ALIVE_INTERVAL = 4
ALIVE_COUNT = 3

# The status with which ssh itself fails.
FAILED = 255


@dataclass(frozen=True)
class Ssh:
    """ssh with the user's options; None leaves a choice to ssh's own configuration."""

    port: int | None = None
    identity: str | None = None

    def command(self) -> list[str]:
        """The command up to the host's name."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_TIMEOUT),
            "ServerAliveInterval": str(ALIVE_INTERVAL),
            "ServerAliveCountMax": str(ALIVE_COUNT),
        }
        words = ["ssh", "-x"]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity is not None:
            words += ["-i", self.identity]
        return words

    def start(self, host: str | None, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a host, or here if that is None, with pipes to all its streams."""
        words = list(command)
        if host is not None:
            # ssh joins its arguments into a text that a shell of the other host reads.
            words = [*self.command(), host, shlex.join(command)]
        return reach.start(words)

    def failure(self, status: int, err: str) -> str | None:
        """Why a host cannot be reached, from the end of such a command; None if it was reached."""
        if status != FAILED:
            return None
        return (
            f"cannot be reached by ssh: {reach.last_line(err)}; expected that `ssh HOST true` "
            "works without a question (a key without a passphrase or in an agent, a known host)"
        )

    def agent(self, job: str) -> str:
        """A shell script that mpirun calls instead of ssh: [OPTION …] HOST COMMAND …"""
        words = [
            sys.executable,
            "-I",
            "-m",
            "hvd_keras.launch.onhost.rsh_agent",
            job,
            *self.command(),
            "--",
        ]
        return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
