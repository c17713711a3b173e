"""Runs hvdrun on hosts of tests.harness.hosts."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvd_keras.launch.onhost.cores import THREAD_VARIABLES
from tests.harness.hosts import Host, Hosts
from tests.harness.launcher import LIMIT

# What the command lines of mpirun and of its daemons on other hosts match: of Open MPI 5 and 4,
# MPICH and Intel MPI.
MPIRUN = r"(prterun|mpirun\S*|mpiexec\S*) -n \d"
DAEMON = r"prted |orted |hydra_pmi_proxy "


def environment(**settings: str) -> dict[str, str]:
    """This process's, without what decides about threads."""
    return {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES} | settings


def environment_of_tests(**settings: str) -> dict[str, str]:
    """The same, in which scripts find the tests' package."""
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return environment(PYTHONPATH=os.pathsep.join(filter(None, places)), **settings)


def hvdrun(*arguments: str) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "hvd_keras.hvdrun", *arguments]


def run(host: Host, *arguments: str, folder: Path, **options) -> subprocess.CompletedProcess[str]:
    """Run hvdrun on this host to its end."""
    options = {"env": environment(), **options}
    return host.run(hvdrun(*arguments), timeout=LIMIT, cwd=folder, **options)


class Running:
    """A hvdrun that was started on the first of the hosts; it writes all output to one file."""

    def __init__(self, hosts: Hosts, folder: Path, command: Sequence[str], env) -> None:
        self.hosts = hosts
        self._path = folder / "output.txt"
        with self._path.open("wb") as output:
            self.process = hosts[0].start(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._path.read_text(errors="replace")

    def wait_for(self, text: str, count: int) -> None:
        """Wait until a text has been printed so many times."""
        limit = time.monotonic() + LIMIT
        while self.output.count(text) < count:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < limit, f"{text!r} is not there: {self.output}"
            time.sleep(0.05)

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {LIMIT} s: {self.output}") from None

    def pids(self, host: int, words: str) -> list[int]:
        """The processes of a host, counted from 0, whose command lines match this."""
        return [p for p, line in self.hosts[host].processes().items() if re.search(words, line)]

    def kill(self, host: int, words: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to these processes; there must be some."""
        pids = self.pids(host, words)
        assert pids, f"no {words} among {self.hosts[host].processes()}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal(self, number: int) -> None:
        """Send hvdrun a signal."""
        self.hosts[0].signal(self.process, number)

    def close(self) -> None:
        """Kill hvdrun if it has not ended."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait(timeout=LIMIT)


@contextlib.contextmanager
def started(
    hosts: Hosts, *arguments: str, folder: Path, env=None, allocation: Sequence[str] = ()
) -> Iterator[Running]:
    """A hvdrun on the first host, which ends with this context, perhaps in SLURM's allocation."""
    running = Running(hosts, folder, [*allocation, *hvdrun(*arguments)], env or environment())
    try:
        yield running
    finally:
        running.close()
