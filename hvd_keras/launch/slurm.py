"""Starts ranks with srun, inside an allocation of SLURM."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_keras.launch import UsageError
from hvd_keras.launch.hosts import Host
from hvd_keras.launch.mpirun import find_mpirun


@dataclass(frozen=True)
class Srun:
    """srun, and the interface through which the ranks' MPI learns its place from it."""

    path: str
    interface: str

    def settings(self, hosts: Sequence[Host] | None, machines: Path) -> dict[str, str]:
        """Environment settings for srun itself."""
        return {} if hosts is None else {"SLURM_HOSTFILE": str(machines)}

    def command(
        self,
        size: int,
        *,
        oversubscribe: bool,
        extra: Sequence[str],
        program: Sequence[str],
        hosts: Sequence[Host] | None,
    ) -> list[str]:
        """The command line that starts `size` ranks on the hosts, or where SLURM wants them."""
        words = [self.path, "-n", str(size), f"--mpi={self.interface}", "--export=ALL"]
        # A rank that fails ends the others; a host that fails leaves the allocation to us.
        words += ["--kill-on-bad-exit=1", "--no-kill", "--cpu-bind=none"]
        if hosts is not None:
            names = ",".join(host.name for host in hosts)
            words += [f"--nodelist={names}", "--distribution=arbitrary"]
        if oversubscribe:
            words.append("--overcommit")
        return [*words, *extra, *program]

    def once_on_each_node(self, nodes: str, program: Sequence[str]) -> list[str]:
        """The command line that runs a program once on each node of the allocation."""
        places = ["-N", nodes] if nodes else []
        return [self.path, *places, "--ntasks-per-node=1", "--overlap", "--mpi=none", *program]


def find(environment: Mapping[str, str]) -> Srun | None:
    """srun, if this is an allocation."""
    if "SLURM_JOB_ID" not in environment:
        return None
    path = shutil.which("srun", path=environment.get("PATH"))
    if path is None:
        return None
    return Srun(path, "pmix" if find_mpirun(None).kind == "Open MPI" else "pmi2")


def size(environment: Mapping[str, str]) -> int:
    """The number of tasks that the allocation is for."""
    text = environment.get("SLURM_NTASKS", "")
    if not text.isdecimal():
        raise UsageError(
            "-np is missing, and this allocation of SLURM has no number of tasks; expected -np N, "
            "or `#SBATCH --ntasks=N`"
        )
    return int(text)
