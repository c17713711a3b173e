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

import asyncio
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvd_keras.launch.onhost import FAILED, program, rsh_agent
from hvd_keras.launch.onhost.limits import ALIVE_COUNT, ALIVE_INTERVAL, CONNECT_TIMEOUT
from hvd_keras.launch.start.command import run
from hvd_keras.launch.start.hosts import is_here

# Hosts that are asked at once: each takes a process and three descriptors here.
AT_ONCE = 200


class Reach(Protocol):
    """Runs commands on other hosts."""

    def reach(self, host: str, command: Sequence[str]) -> list[str]:
        """Return what runs a command on a host, with its own standard streams."""

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

    def reach(self, host: str, command: Sequence[str]) -> list[str]:
        """Return what runs a command on a host, with its own standard streams."""
        return [*self.words, host, shlex.join(command)]

    def failure(self, status: int, err: str) -> str | None:
        """Return why the host could not be reached, or None if the command itself failed."""
        if status != FAILED:
            return None
        test = self.test or f"{Path(self.words[0]).name} HOST true"
        name = test.split()[0]
        reason = last_line(err).removeprefix(f"{name}: ")
        return f"cannot be reached by {name}: {reason}; expected that `{test}` works{self.advice}"

    def agent(self, job: str, cleans: bool) -> str:
        """Return a shell script that mpirun calls as ssh, with options, a host and a command.

        `cleans` tells that it removes the job's files when the command there has ended.
        """
        mode = rsh_agent.CLEANS if cleans else rsh_agent.PASSES
        words = [sys.executable, "-I", "-S", rsh_agent.__file__, mode, job, *self.words, "--"]
        return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def ssh(port: int | None, identity: str | None) -> RemoteShell:
    """Return ssh in batch mode, with keep-alives; None leaves the choice to ssh's configuration."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": str(ALIVE_INTERVAL),
        "ServerAliveCountMax": str(ALIVE_COUNT),
        # An existing master is used, but none of ours: another shell would end with the job.
        "ControlMaster": "no",
    }
    words = ["ssh", "-x"]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    if port is not None:
        words += ["-p", str(port)]
    if identity is not None:
        words += ["-i", identity]
    advice = " without a prompt (a key without a passphrase or in an agent, a known host)"
    return RemoteShell(words, advice)


def kubectl_exec(words: Sequence[str]) -> RemoteShell:
    """`kubectl exec` with its options: hosts are pods."""
    test = "kubectl exec POD -- true"
    return RemoteShell([*program("kubectl_exec"), *words], ", where HOST is POD or POD.…", test)


async def run_on_all(
    names: Collection[str], reach: Reach, command: Sequence[str], text: str
) -> dict[str, subprocess.CompletedProcess[str] | None]:
    """Run a command with this input on all hosts at once; None: a host did not answer in time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(name: str) -> subprocess.CompletedProcess[str] | None:
        async with places:
            is_own = await asyncio.to_thread(is_here, name)
            try:
                return await run(command if is_own else reach.reach(name, command), text)
            except TimeoutError:
                return None
            except OSError as error:  # no ssh here, or too many processes
                return subprocess.CompletedProcess(command, FAILED, "", str(error))

    return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))


def answer(out: str, mark: str) -> str | None:
    """Return what follows the mark in a host's output, into which its shell may print a greeting.

    None: there is no such line.
    """
    found = [line for line in out.splitlines() if line.startswith(mark)]
    return found[-1].removeprefix(mark) if found else None


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["no output"])[-1]
