"""How hosts are reached: a command is started there, its output streams back, its end ends it.

hvdrun and mpirun reach other hosts through a program that is called as ssh is:

    PROGRAM HOST 'TEXT FOR A SHELL'

It runs the text there with its own stdin, stdout and stderr, exits with the text's status, or with
255 and a last line on stderr that says why if HOST cannot be reached. When it is killed, or its
stdin ends, the command there may live on: hvdrun finds and ends what belongs to a job by itself
(`clean_up`). Every program of this kind will do (`hvdrun --remote-shell PROGRAM`): ssh; the client
of the agents in `onhost/agent.py`, for hosts where something else starts processes; and
`onhost/kubectl_exec.py`, for pods. Inside a SLURM allocation `slurm.Srun` has the first two
methods, and starts the ranks itself.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvd_keras.launch.onhost import program, rsh_agent
from hvd_keras.launch.start.hosts import is_here

# The status with which such a program itself fails.
FAILED = 255


class Reach(Protocol):
    """Runs commands on other hosts."""

    def start(self, host: str | None, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a host (None: this host) with pipes for stdin, stdout and stderr."""

    def failure(self, status: int, err: str) -> str | None:
        """Return why the host could not be reached, or None if the command itself failed."""


@dataclass(frozen=True)
class RemoteShell:
    """A program that is called as ssh is, with its options.

    If it cannot reach a host, `advice` helps. `test` is what a user should try then; default:
    "PROGRAM HOST true".
    """

    words: Sequence[str]
    advice: str = ""
    test: str = ""

    def start(self, host: str | None, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a host (None: this host) with pipes for stdin, stdout and stderr."""
        return start(command if host is None else [*self.words, host, shlex.join(command)])

    def failure(self, status: int, err: str) -> str | None:
        """Return why the host could not be reached, or None if the command itself failed."""
        if status != FAILED:
            return None
        test = self.test or f"{Path(self.words[0]).name} HOST true"
        name = test.split()[0]
        reason = last_line(err).removeprefix(f"{name}: ")
        return f"cannot be reached by {name}: {reason}; expected that `{test}` works{self.advice}"

    def agent(self, job: str) -> str:
        """A shell script that mpirun calls instead of ssh: [OPTION …] HOST COMMAND …"""
        words = [sys.executable, "-I", "-S", rsh_agent.__file__, job, *self.words, "--"]
        return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def kubectl_exec(words: Sequence[str]) -> RemoteShell:
    """`kubectl exec` with its options: hosts are pods."""
    test = "kubectl exec POD -- true"
    return RemoteShell([*program("kubectl_exec"), *words], ", where HOST is POD or POD.…", test)


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


def answer(out: str, mark: str) -> str | None:
    """Return what follows the mark in a host's output, into which its shell may print a greeting.

    None: there is no such line.
    """
    found = [line for line in out.splitlines() if line.startswith(mark)]
    return found[-1].removeprefix(mark) if found else None


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["no output"])[-1]
