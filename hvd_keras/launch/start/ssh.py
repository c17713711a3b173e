"""Runs commands on other hosts: ssh in batch mode, with keep-alives."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_keras.launch.onhost import rsh_agent
from hvd_keras.launch.start import remote_shell as reach

# Seconds until a host that does not answer counts as unreachable.
CONNECT_TIMEOUT = 5

# Seconds between keep-alives, and how many may be missed: a network failure of 5 s is tolerated;
# hvdrun itself (`channel.SILENCE`) detects a longer one earlier.
ALIVE_INTERVAL = 4
ALIVE_COUNT = 3

# The status with which ssh itself fails.
FAILED = 255


@dataclass(frozen=True)
class Ssh:
    """ssh with the user's options; None leaves the choice to ssh's configuration."""

    port: int | None = None
    identity: str | None = None

    def command(self) -> list[str]:
        """Return the ssh command line up to the host name."""
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
        """Start a command on a host (None: this host) with pipes for stdin, stdout and stderr."""
        words = list(command)
        if host is not None:
            # ssh joins its arguments into a text that a shell of the other host reads.
            words = [*self.command(), host, shlex.join(command)]
        return reach.start(words)

    def failure(self, status: int, err: str) -> str | None:
        """Return why the host could not be reached, or None if the command itself failed."""
        if status != FAILED:
            return None
        reason = reach.last_line(err).removeprefix("ssh: ")
        return (
            f"cannot be reached by ssh: {reason}; expected that `ssh HOST true` works without a "
            "prompt (a key without a passphrase or in an agent, a known host)"
        )

    def agent(self, job: str) -> str:
        """A shell script that mpirun calls instead of ssh: [OPTION …] HOST COMMAND …"""
        words = [sys.executable, "-I", "-S", rsh_agent.__file__, job, *self.command(), "--"]
        return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
