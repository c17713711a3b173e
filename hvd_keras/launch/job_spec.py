"""The job that the user asked for, checked and completed; the same for every restart."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_keras.launch import command_check, horovod, options
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.follow import metrics, screen
from hvd_keras.launch.follow.statistics import Statistics
from hvd_keras.launch.onhost.cores import usable_cores, usable_gpus
from hvd_keras.launch.start import hosts, slurm
from hvd_keras.launch.start.hosts import Host
from hvd_keras.launch.start.mpirun import Mpirun, find_mpirun
from hvd_keras.launch.start.remote_shell import Reach, RemoteShell, kubectl_exec
from hvd_keras.launch.start.slurm import Srun
from hvd_keras.launch.start.ssh import ssh

# The variables of hvdrun's environment that ranks on other hosts get; --env adds further ones.
PASSED = ("PATH", "LD_LIBRARY_PATH")
PASSED_PREFIXES = (
    *("HVD_", "TF_", "KERAS_", "PYTHON", "OMP_", "XLA_", "CUDA_", "NCCL_"),
    *("OMPI_MCA_", "UCX_", "FI_", "I_MPI_", "MPICH_"),
)


@dataclass(frozen=True)
class JobSpec:
    """A job. `hosts` is None for a job on this host, and with srun where SLURM places the ranks."""

    options: argparse.Namespace
    command: Sequence[str]
    engine: Mpirun | Srun
    hosts: Sequence[Host] | None
    size: int | None  # None: all slots of the hosts
    shell: RemoteShell
    jobs: list[str] = field(default_factory=list)  # the numbers of all starts on several hosts
    statistics: Statistics = field(default_factory=Statistics)
    lost: set[str] = field(default_factory=set)  # hosts that could not be reached after one

    @property
    def is_local(self) -> bool:
        """Whether the job runs on this host alone, without SLURM."""
        return self.hosts is None and isinstance(self.engine, Mpirun)

    @property
    def reach(self) -> Reach:
        """How commands reach the hosts."""
        return self.engine if isinstance(self.engine, Srun) else self.shell

    def wanted(self) -> Sequence[Host]:
        """Return the hosts that the job may use at this moment. Raises UsageError."""
        if self.options.host_discovery_script is not None:
            return hosts.discover(self.options.host_discovery_script)
        return slurm.nodes(os.environ) if self.hosts is None else self.hosts

    def environment(self) -> dict[str, str]:
        """Return the part of our environment that ranks on other hosts get."""
        return {
            name: value
            for name, value in os.environ.items()
            if name in PASSED or name.startswith(PASSED_PREFIXES) or name in self.options.env
        }

    def option_settings(self) -> dict[str, str]:
        """Return the environment settings of hvd_keras that options stand for."""
        settings = horovod.settings(os.environ) if self.options.horovod else {}
        settings |= self.options.settings
        if isinstance(self.engine, Mpirun) and self.engine.library:
            settings["HVD_MPI_LIBRARY"] = self.engine.library
        if self.options.timeline is not None:
            settings["HVD_TIMELINE"] = str(Path(self.options.timeline).absolute())
        if self.options.strict:
            settings["HVD_STRICT"] = "1"
        return settings


def build(given: argparse.Namespace) -> JobSpec:
    """Build the job from the options. Raises UsageError."""
    words = given.command[1:] if given.command[:1] == ["--"] else given.command
    if given.module:
        words = ["-m", *given.module]
    if given.check:
        if words:
            raise UsageError(
                f"--check got the command {' '.join(words)!r}; --check takes no command"
            )
        words = [sys.executable, "-m", "hvd_keras.check"]
        if given.size is None and not (given.hosts or given.hostfile):
            given.size = min(2, usable_cores())
    wanted = _hosts(given)
    engine, wanted, size = _engine(given, wanted, given.size)
    if given.check:
        words.append(engine.path)
    if not words:
        raise UsageError(
            f"the command is missing; expected a program, for example: {options.EXAMPLE}"
        )
    _check_observers(given)
    for name in given.env:
        if name not in os.environ:
            raise UsageError(
                f"--env got {name!r}, which is not set; expected the name of a variable"
            )
    return JobSpec(
        options=given,
        command=command_check.resolve(words),
        engine=engine,
        hosts=wanted,
        size=size,
        shell=_shell(given),
    )


def _shell(given: argparse.Namespace) -> RemoteShell:
    """The program by which mpirun and hvdrun reach the hosts."""
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


def _hosts(given: argparse.Namespace) -> list[Host] | None:
    named = [
        option
        for option, value in (
            ("-H", given.hosts),
            ("--hostfile", given.hostfile),
            ("--host-discovery-script", given.host_discovery_script),
        )
        if value is not None
    ]
    if len(named) > 1:
        raise UsageError(f"got {' and '.join(named)}; expected one of them")
    if given.hosts is not None:
        return hosts.parse(given.hosts)
    if given.hostfile is not None:
        return hosts.read(given.hostfile)
    if given.host_discovery_script is not None:
        return hosts.discover(given.host_discovery_script)
    return None


def _engine(
    given: argparse.Namespace, wanted: list[Host] | None, size: int | None
) -> tuple[Mpirun | Srun, list[Host] | None, int | None]:
    """Choose what starts the ranks. A job on this host alone gets a size, but no hosts."""
    srun = None if given.mpirun or given.remote_shell else slurm.find(os.environ)
    is_auto = size == options.AUTO
    if wanted is None and given.per_host is not None:
        if srun is not None or size:
            what = "a SLURM allocation" if srun is not None else "-np"
            raise UsageError(f"got --nproc-per-node with {what} and no hosts; expected -np alone")
        size = given.per_host
    if srun is not None:
        return srun, wanted, size or (None if wanted else slurm.size(os.environ))
    if (
        wanted is not None
        and given.host_discovery_script is None
        and all(hosts.is_here(host.name) for host in wanted)
    ):
        if len(wanted) > 1:
            names = " and ".join(host.name for host in wanted)
            raise UsageError(
                f"the hosts {names} are all this host; name it once, with all its ranks"
            )
        slots = wanted[0].slots or given.per_host
        size = size or slots or (usable_gpus(os.environ) * is_auto) or usable_cores()
        if slots is not None and size > slots and not given.oversubscribe:
            raise _too_many(size, slots, "slot")
        given.oversubscribe = given.oversubscribe or slots is not None
        wanted = None
    if wanted is None:
        if is_auto:
            size = size or usable_gpus(os.environ) or usable_cores()
        if size is None:
            raise UsageError(
                "-np is missing; expected the number of ranks, or auto for all cores or GPUs, for "
                f"example: {options.EXAMPLE}"
            )
        if size > usable_cores() and not given.oversubscribe:
            if not given.horovod:
                raise _too_many(size, usable_cores(), "core")
            given.oversubscribe = True  # horovodrun never refuses
            print(
                f"hvdrun: {size} ranks share {usable_cores()} cores, which is slow", file=sys.stderr
            )
    return find_mpirun(given.mpirun), wanted, size


def _too_many(size: int, there: int, what: str) -> UsageError:
    place = "this process may use" if what == "core" else "-H has"
    return UsageError(
        f"-np got {size}, but {place} {there} {what}{'s' * (there != 1)}; expected "
        f"at most {there}, or --oversubscribe to let ranks share cores, which is slow"
    )


def _check_observers(given: argparse.Namespace) -> None:
    given.screen = given.stats and screen.wanted()
    if given.metrics is not None:
        metrics.parse(given.metrics)
    if given.timeline is not None:
        path = Path(given.timeline).absolute()
        if not given.timeline or path.is_dir() or not path.parent.is_dir():
            raise UsageError(
                f"--timeline got {given.timeline!r}; expected the path of a file in an "
                "existing folder"
            )
