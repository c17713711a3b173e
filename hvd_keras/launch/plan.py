"""The command that starts the ranks of a job, with its settings and files."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_keras.launch.job_spec import JobSpec
from hvd_keras.launch.onhost import worker
from hvd_keras.launch.onhost.cores import thread_settings, usable_cores
from hvd_keras.launch.start.hosts import Host
from hvd_keras.launch.start.mpirun import Mpirun, Remote
from hvd_keras.launch.start.network import common_network
from hvd_keras.launch.start.slurm import Srun

PROGRAM = [sys.executable, "-I", "-S", str(Path(worker.__file__).with_name("start_worker.py"))]

# Shown in place of the secret.
HIDDEN = "SECRET"


@dataclass(frozen=True)
class Placement:
    """The hosts of one start, with the ranks of each.

    `names` maps the hosts' own names to the names that the user gave; in a job on this host alone,
    to "". `hosts` is None in such a job, and if SLURM places the ranks.
    """

    size: int
    hosts: Sequence[Host] | None
    names: Mapping[str, str]

    def describe(self) -> str:
        """Describe it in words, such as "2 ranks on this host, 1 core each"."""
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        if self.hosts is not None:
            return f"{ranks} on {', '.join(f'{host.name}:{host.slots}' for host in self.hosts)}"
        if "" not in self.names.values():
            return f"{ranks} where SLURM places them"
        cores = max(1, usable_cores() // self.size)
        each = " each" * (self.size != 1)
        return f"{ranks} on this host, {cores} core{'s' * (cores != 1)}{each}"


@dataclass(frozen=True)
class Plan:
    """The settings and the command of mpirun or srun, and the files that they need.

    `environment` is what the ranks get, besides what depends on their hosts.
    """

    settings: Mapping[str, str]
    command: Sequence[str]
    files: Mapping[Path, str]
    environment: Mapping[str, str]
    is_local: bool

    def describe(self) -> str:
        """Describe the plan for the user, without the secret."""
        # Ranks on other hosts get much of our environment.
        shown = {**self.settings, **(self.environment if self.is_local else {})}
        if worker.SECRET in shown:
            shown[worker.SECRET] = HIDDEN
        lines = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        for path, text in self.files.items():
            lines += [f"{path}: {line}" for line in text.splitlines() if line != "#!/bin/sh"]
        return "\n".join([*lines, shlex.join(self.command)])


def memory_folder(job: str) -> str:
    """The folder for the shared memory of MPI, which killed ranks cannot remove."""
    return f"/dev/shm/hvdrun-{job}"


def _environment(spec: JobSpec, placement: Placement, job: str) -> dict[str, str]:
    settings = spec.option_settings()
    if isinstance(spec.engine, Mpirun):
        settings |= spec.engine.memory_settings(memory_folder(job))
    else:
        settings |= spec.engine.rank_settings()
    if spec.is_local:  # the rest is inherited
        return settings | thread_settings(placement.size, os.environ, usable_cores())
    return spec.environment() | settings | {worker.JOB: job}


def plan(
    spec: JobSpec,
    placement: Placement,
    *,
    directory: Path,
    job: str,
    secret: str,
    addresses: str,
) -> Plan:
    """Plan how to start the ranks' workers."""
    variables = {worker.JOB: job, worker.ADDRESSES: addresses, worker.SECRET: secret}
    machines = directory / "machines"
    agent = directory / "ssh"
    files = {}
    options = spec.options
    engine = spec.engine
    if isinstance(engine, Srun):
        if placement.hosts is not None:
            lines = [host.name for host in placement.hosts for _ in range(host.slots or 0)]
            files[machines] = "\n".join(lines) + "\n"
        settings = engine.settings(placement.hosts, machines)
        command = engine.command(
            placement.size,
            oversubscribe=options.oversubscribe,
            extra=options.mpi_args,
            program=PROGRAM,
            hosts=placement.hosts,
        )
    else:
        remote = None
        if placement.hosts is not None:
            network = options.network_interface or common_network(placement.hosts)
            remote = Remote(placement.hosts, agent, machines, network)
            files[agent] = spec.shell.agent(job)
            if engine.kind == "Intel MPI":
                files[machines] = "".join(f"{host.name}:{host.slots}\n" for host in placement.hosts)
        settings = engine.settings(directory)
        command = engine.command(
            placement.size,
            oversubscribe=options.oversubscribe,
            variables=variables,
            extra=options.mpi_args,
            program=PROGRAM,
            remote=remote,
        )
    environment = _environment(spec, placement, job)
    return Plan(variables | settings, command, files, environment, spec.is_local)
