"""The job that the user asked for, checked and completed; the same for every restart."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_keras.launch import command_check, options
from hvd_keras.launch.errors import UsageError, say
from hvd_keras.launch.follow.statistics import Statistics
from hvd_keras.launch.onhost import process, worker
from hvd_keras.launch.onhost.cores import thread_settings, usable_cores, usable_gpus
from hvd_keras.launch.onhost.fork_server import KEEP
from hvd_keras.launch.start import hosts, slurm
from hvd_keras.launch.start.hosts import Host, Placement, common_network
from hvd_keras.launch.start.mpirun import VARIABLES, Dialect, Plan, find_mpirun
from hvd_keras.launch.start.remote_shell import Remains, RemoteShell, kubectl_exec, ssh

POSTMORTEM = "postmortem"  # the folder of the ranks' requests in the job's, unless the user has one


@dataclass(frozen=True)
class JobSpec:
    """A job. `hosts` is None if a script or SLURM names them, before each start."""

    options: argparse.Namespace
    command: Sequence[str]
    dialect: Dialect
    hosts: Sequence[Host] | None
    is_local: bool  # on this host alone, without SLURM
    shell: RemoteShell
    remains: Remains
    statistics: Statistics = field(default_factory=Statistics)

    async def wanted(self) -> Sequence[Host]:
        """Return the hosts that the job may use at this moment. Raises UsageError."""
        if self.hosts is not None:
            return self.hosts
        script = self.options.host_discovery_script
        return await (slurm.nodes(os.environ) if script is None else hosts.discover(script))

    def rank_environment(self, size: int, directory: Path, job: str) -> dict[str, str]:
        """Return what ranks get besides what depends on their hosts; here, besides our own."""
        given, own = self.options, os.environ
        memory = worker.memory_folder(job)
        # Without it, what a rank has printed into our pipe is late, and lost if it is killed.
        unbuffered = {"PYTHONUNBUFFERED": own.get("PYTHONUNBUFFERED", "1")}
        settings: dict[str, str] = unbuffered | given.settings | self.dialect.rank_settings(memory)
        if self.dialect.library:
            settings["HVD_MPI_LIBRARY"] = self.dialect.library
        if given.timeline is not None:
            settings["HVD_TIMELINE"] = str(Path(given.timeline).absolute())
        flags = {"HVD_STRICT": given.strict, "HVDRUN_VERBOSE": given.verbose}
        flags["HVDRUN_STATISTICS"] = given.stats or given.metrics is not None
        settings |= {name: "1" for name, is_on in flags.items() if is_on}
        if self.is_local and given.postmortem is None:
            settings["HVDRUN_POSTMORTEM"] = str(directory / POSTMORTEM)
        if self.is_local:
            return thread_settings(size, own, usable_cores()) | settings
        names = {name for name in own if name.startswith(options.PASSED_PREFIXES)}
        names |= {*options.PASSED, *given.env} & own.keys()
        return {name: own[name] for name in sorted(names)} | settings | {process.JOB: job}

    def plan(
        self, placement: Placement, directory: Path, job: str, secret: str, addresses: str
    ) -> Plan:
        given, dialect = self.options, self.dialect
        network = given.network_interface
        if network is None and dialect.takes_ranges:
            network = common_network(placement.hosts)
        made = Plan(
            placement,
            self.is_local,
            directory,
            agent=self.shell.agent(job, dialect.kills_workers),
            network=None if self.is_local else network,
            oversubscribe=given.oversubscribe,
            extra=given.mpi_args,
            environment=self.rank_environment(placement.size, directory, job),
            settings=dict(zip(VARIABLES, (job, addresses, secret), strict=True)),
        )
        dialect.complete(made)
        return made


def build(given: argparse.Namespace) -> JobSpec:
    """Build the job from the options. Raises UsageError."""
    words = given.command
    if not (keep := os.environ.get(KEEP) or "0").isdecimal():
        raise UsageError(f"{KEEP} is {keep!r}; expected seconds, an integer of at least 0")
    if given.check:
        if words:
            raise UsageError(f"--check got {' '.join(words)!r}; expected no command")
        words = [sys.executable, "-m", "hvd_keras.check"]
        if given.size is None and not (given.hosts or given.hostfile):
            given.size = min(2, usable_cores())
    if late := [word for word in words[1:] if word.partition("=")[0] in _BEFORE]:
        say(f"{late[0]} follows the program, which gets it; hvdrun's own options come before")
    ways = {"-H": given.hosts, "--hostfile": given.hostfile}
    ways["--host-discovery-script"] = given.host_discovery_script
    if len(named := [option for option, value in ways.items() if value is not None]) > 1:
        raise UsageError(f"got {' and '.join(named)}; expected one of them")
    wanted = None if given.hosts is None else hosts.parse(given.hosts)
    if given.hostfile is not None:
        wanted = hosts.read(given.hostfile)
    srun = None if given.mpirun or given.remote_shell else slurm.find(os.environ)
    dialect = srun or find_mpirun(given.mpirun)
    if given.per_host and not named and (srun is not None or given.size):
        what = "-np" if srun is None else "a SLURM allocation"
        raise UsageError(f"got --nproc-per-node with {what} and no hosts; expected -np alone")
    names = ["localhost"] if wanted is None else [host.name for host in wanted]
    is_one = given.host_discovery_script is None and len(names) == 1
    if is_local := srun is None and is_one and hosts.is_here(names[0]):
        wanted = [_this_host(given, wanted)]
    if given.check:
        words.append(dialect.path)
    if not words:
        raise UsageError(
            f"the command is missing; expected a program, for example: {options.EXAMPLE}"
        )
    command, shell = command_check.resolve(words), _shell(given)
    remains = Remains(srun or shell, is_local)
    return JobSpec(given, command, dialect, wanted, is_local, shell, remains)


# Options that a user may have meant for hvdrun, though they are behind the program.
_BEFORE = {"--auto", "--max-restarts", "--output-dir", "--oversubscribe", "--postmortem", "--stats"}


def _shell(given: argparse.Namespace) -> RemoteShell:
    """Return the program by which mpirun and hvdrun reach the hosts."""
    identity = given.ssh_identity_file
    if identity is not None and not Path(identity).is_file():
        raise UsageError(f"--ssh-identity-file got {identity!r}, which is not a file")
    if not given.remote_shell:
        return ssh(given.ssh_port, None if identity is None else str(Path(identity).absolute()))
    if given.ssh_port is not None or identity is not None:
        raise UsageError("got --remote-shell and an option for ssh; expected one of them")
    path = shutil.which(given.remote_shell[0])
    if path is None:
        raise UsageError(
            f"--remote-shell got {given.remote_shell[0]!r}, which is not an executable file; "
            "expected a program that is called as ssh is: PROGRAM HOST 'text for a shell'"
        )
    words = [str(Path(path).absolute()), *given.remote_shell[1:]]
    is_kubectl = Path(path).name == "kubectl" and words[1:2] == ["exec"]
    return kubectl_exec(words) if is_kubectl else RemoteShell(words)


def _this_host(given: argparse.Namespace, wanted: list[Host] | None) -> Host:
    """Return this host with the number of ranks that it gets."""
    slots = (wanted[0].slots or given.per_host) if wanted else None
    size = given.size or slots or given.per_host
    if size is None:
        if wanted is None and given.size is None:
            late = {"-np", "-n", "--num-proc"} & {*given.command}
            where = " before the program: what follows it are its own arguments" if late else ""
            raise UsageError(
                f"-np is missing{where}; expected the number of ranks, or auto for all cores or "
                f"GPUs, for example: {options.EXAMPLE}"
            )
        gpus = usable_gpus(os.environ) if given.size == options.AUTO else 0
        size = gpus or usable_cores()
    there, what = (usable_cores(), "core") if slots is None else (slots, "slot")
    if size > there and not given.oversubscribe:
        if not given.may_share_cores or slots is not None:
            place = "this process may use" if what == "core" else "-H has"
            raise UsageError(
                f"-np got {size}, but {place} {there} {what}{'s' * (there != 1)}; expected at most "
                f"{there}, or --oversubscribe to let ranks share cores, which is slow"
            )
        say(f"{size} ranks share {there} cores, which is slow")
    if 0 < usable_gpus(os.environ) < size and not os.environ.keys() & _SHARING:
        given.settings["HVD_GPU_OPERATIONS"] = "MPI"  # the ranks warn, if they use a GPU
    return Host("localhost", size)


# By which the user says whether and how ranks share a GPU.
_SHARING = {"HVD_GPU_OPERATIONS", "NCCL_MULTI_RANK_GPU_ENABLE"}
