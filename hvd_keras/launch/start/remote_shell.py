"""How hosts are reached: a command is started there, its output streams back, its end ends it.

hvdrun and mpirun reach other hosts through a program that is called as ssh is:

    PROGRAM HOST 'TEXT FOR A SHELL'

It runs the text there with its own stdin, stdout and stderr, exits with the text's status, or with
255 and a last line on stderr that says why if HOST cannot be reached. When it is killed, or its
stdin ends, the command there may live on: hvdrun finds and ends what belongs to a job by itself
(`Remains`). Every program of this kind will do (`hvdrun --remote-shell PROGRAM`): ssh, or
`kubectl_exec`, for pods, which says ENDED where others exit with another status than 255.
Inside a SLURM allocation `slurm.Srun` has the first two methods, and starts the ranks itself.
"""

import asyncio
import secrets
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_keras.launch.errors import say
from hvd_keras.launch.onhost import FAILED, limits, sweep
from hvd_keras.launch.start.command import run
from hvd_keras.launch.start.hosts import is_here
from hvd_keras.launch.start.slurm import Srun

# Hosts that are asked at once: each takes a process and three descriptors here.
AT_ONCE = 200

# What mpirun runs as its ssh. mpirun adds -x, which `ssh` has already, and the user's own options
# for ssh, which hvdrun takes by --ssh-port and --ssh-identity-file; some have a value. Its words
# are quoted for the user's shell on the other host.
_AGENT = r"""#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do
  case $1 in -[BbcDEeFIiJLlmOoPpQRSWw]) shift ;; esac
  shift
done
host=$1
shift
words=$(printf %s "$*" | sed "s/'/'\"'\"'/g")
exec {reach} "$host" {start}" '$words'"
"""

# What kubectl says on stderr when the command itself has failed, with whose status it exits.
ENDED = "command terminated with exit code"


@dataclass(frozen=True)
class RemoteShell:
    """A program that is called as ssh is, with its options."""

    words: Sequence[str]
    advice: str = ""  # if it cannot reach a host
    test: str = ""  # what a user should try then; default: "PROGRAM HOST true"
    says_ended: bool = False  # when the command itself has failed

    def reach(self, host: str, command: Sequence[str]) -> list[str]:
        """Return what runs a command on a host, with its own standard streams."""
        return [*self.words, host, shlex.join(command)]

    def failure(self, status: int, err: str) -> str | None:
        """Return why the host could not be reached, or None if the command itself failed."""
        if status == 0 or (ENDED in err if self.says_ended else status != FAILED):
            return None
        test = self.test or f"{Path(self.words[0]).name} HOST true"
        name = test.split()[0]
        reason = last_line(err).removeprefix(f"{name}: ")
        return f"cannot be reached by {name}: {reason}; expected that `{test}` works{self.advice}"

    def agent(self, job: str, cleans: bool) -> str:
        """Return a script that mpirun calls as ssh; it `cleans` up when the command has ended.

        On the other host the command gets the job's number, by which it and all that it starts can
        be found, and a folder for temporary files that goes with the job.
        """
        start = f't=${{TMPDIR:-/tmp}}; d=$t/hvdrun-{job}; mkdir -p "$t"; '
        # What another user has made there first is refused.
        start += 'mkdir -m 700 "$d" || { [ -O "$d" ] && [ ! -L "$d" ]; } || exit; '
        run = f'env HVDRUN_JOB={job} TMPDIR="$d" "${{SHELL:-/bin/sh}}" -c "$0"'
        clean = f'{run}; status=$?; rm -rf "$d" /dev/shm/hvdrun-{job}; exit $status'
        start += clean if cleans else f"exec {run}"
        text = shlex.quote(f"exec sh -c {shlex.quote(start)}")
        return _AGENT.format(reach=shlex.join(self.words), start=text)


Reach = RemoteShell | Srun  # how hosts are reached


def ssh(port: int | None, identity: str | None) -> RemoteShell:
    """Return ssh in batch mode, with keep-alives; None leaves the choice to ssh's configuration."""
    words = ["ssh", "-x"]
    for option in (
        "BatchMode=yes",
        f"ConnectTimeout={limits.CONNECT_TIMEOUT}",
        f"ServerAliveInterval={limits.ALIVE_INTERVAL}",
        f"ServerAliveCountMax={limits.ALIVE_COUNT}",
        # An existing master is used, but none of ours: another shell would end with the job.
        "ControlMaster=no",
    ):
        words += ["-o", option]
    words += [] if port is None else ["-p", str(port)]
    words += [] if identity is None else ["-i", identity]
    advice = " without a prompt (a key without a passphrase or in an agent, a known host)"
    return RemoteShell(words, advice)


def kubectl_exec(words: Sequence[str]) -> RemoteShell:
    """`kubectl exec` with its options: a host is a pod, by its name or one that begins with it."""
    test = "kubectl exec POD -- true"
    advice = ", where HOST is POD or POD.…"
    # Its arguments $0 and $1 are the host and the text.
    script = f'exec {shlex.join(words)} --stdin "${{0%%.*}}" -- /bin/sh -c "$1"'
    return RemoteShell(["/bin/sh", "-c", script], advice, test, says_ended=True)


@dataclass(frozen=True)
class Answer:
    """What a host has said; or why it has not, and whether it could not be reached."""

    text: str = ""
    problem: str = ""
    away: bool = False


async def ask_all(
    names: Collection[str], reach: Reach, script: Any, arguments: Sequence[str]
) -> dict[str, Answer]:
    """Pipe this script of `onhost` to Python with these arguments on all hosts at once."""
    places = asyncio.Semaphore(AT_ONCE)
    command = [sys.executable, *arguments]
    source = Path(script.__file__).read_text()

    async def ask(name: str) -> Answer:
        async with places:
            is_own = await asyncio.to_thread(is_here, name)
            try:
                done = await run(command if is_own else reach.reach(name, command), source)
            except TimeoutError:
                return Answer("", f"did not answer within {limits.ANSWER_TIMEOUT:.0f} s", True)
            except OSError as error:  # no ssh here, or too many processes
                done = subprocess.CompletedProcess(command, FAILED, "", str(error))
        # The answer follows its mark, because a host's shell may print a greeting.
        found = [line for line in done.stdout.splitlines() if line.startswith(script.MARK)]
        if found:
            return Answer(found[-1].removeprefix(script.MARK))
        if unreachable := reach.failure(done.returncode, done.stderr):
            return Answer("", unreachable, True)
        if done.returncode in (126, 127):  # of a shell that could not run the program
            expected = "expected the same Python at the same path on all hosts"
            return Answer("", f"has no {sys.executable}; {expected}")
        why = f"exit status {done.returncode}: {last_line(done.stderr.partition(ENDED)[0])}"
        return Answer("", f"cannot run {sys.executable}: {why}")

    return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))


@dataclass
class Remains:
    """What may be left of a job, and on which hosts."""

    reach: Reach
    is_local: bool = False  # on this host alone
    starts: list[str] = field(default_factory=list)  # the numbers of the job's starts
    # The number of the servers that have the ranks' imports ready.
    server: str = field(default_factory=lambda: secrets.token_hex(8))
    hosts: set[str] = field(default_factory=set)  # of all starts
    lost: set[str] = field(default_factory=set)  # of these, what could not be reached after one

    async def sweep(
        self, names: Collection[str], grace: float = 0.0, *, servers: bool = False
    ) -> set[str]:
        """Kill processes and remove files on these hosts; returns those that are lost."""
        jobs = [*self.starts, *[self.server] * servers]
        if self.is_local:
            stuck = await asyncio.to_thread(sweep.sweep, jobs, grace)
            answers = {"": Answer(" ".join(map(str, stuck)))}
        else:
            answers = await ask_all(names, self.reach, sweep, ["-I", "-S", "-", str(grace), *jobs])
        for name, answer in answers.items():
            where = f"{name}: " if name else ""
            if answer.problem and not answer.away:
                say(f"{where}the clean-up failed: it {answer.problem}")
            if answer.text:
                processes = ", ".join(answer.text.split())
                say(f"{where}cannot kill process {processes} of the job")
        lost = {name for name, answer in answers.items() if answer.away}
        self.lost = self.lost - set(names) | lost
        return lost


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["no output"])[-1]
