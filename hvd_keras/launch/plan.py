"""The command that starts the ranks of a job once, with its settings and files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_keras.launch.job_spec import Request
from hvd_keras.launch.onhost import worker_remote as remote
from hvd_keras.launch.start.hosts import Host
from hvd_keras.launch.start.mpirun import Remote
from hvd_keras.launch.start.network import common_network
from hvd_keras.launch.start.slurm import Srun

PROGRAM = [sys.executable, "-I", "-m", "hvd_keras.launch.onhost.worker_remote"]

# What stands for the secret where the settings are shown.
HIDDEN = "SECRET"


@dataclass(frozen=True)
class Placement:
    """The hosts of one start, with the ranks of each, and the names that they have for MPI.

    `hosts` is None where SLURM places the ranks, on any of those that `names` holds.
    """

    size: int
    hosts: Sequence[Host] | None
    names: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """The settings and the command of mpirun or srun, and the files that they need."""

    settings: Mapping[str, str]
    command: Sequence[str]
    files: Mapping[Path, str]

    def describe(self) -> str:
        """The same in words, without the secret."""
        shown = dict(self.settings)
        if remote.SECRET in shown:
            shown[remote.SECRET] = HIDDEN
        lines = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        for path, text in self.files.items():
            lines += [f"{path}: {line}" for line in text.splitlines() if line != "#!/bin/sh"]
        return "\n".join([*lines, shlex.join(self.command)])


def plan(
    request: Request,
    placement: Placement,
    *,
    directory: Path,
    job: str,
    secret: str,
    addresses: str,
) -> Plan:
    """How to start the ranks' workers."""
    variables = {remote.JOB: job, remote.ADDRESSES: addresses, remote.SECRET: secret}
    machines = directory / "machines"
    agent = directory / "ssh"
    network = request.options.network_interface or common_network(placement.hosts or ())
    if isinstance(request.engine, Srun):
        files = {}
        if placement.hosts is not None:
            lines = [host.name for host in placement.hosts for _ in range(host.slots or 0)]
            files[machines] = "\n".join(lines) + "\n"
        command = request.engine.command(
            placement.size,
            oversubscribe=request.options.oversubscribe,
            extra=request.extra,
            program=PROGRAM,
            hosts=placement.hosts,
        )
        return Plan(variables | request.engine.settings(placement.hosts, machines), command, files)
    assert placement.hosts is not None
    files = {agent: request.ssh.agent(job)}
    if request.engine.kind == "Intel MPI":
        files[machines] = "".join(f"{host.name}:{host.slots}\n" for host in placement.hosts)
    command = request.engine.command(
        placement.size,
        oversubscribe=request.options.oversubscribe,
        variables=variables,
        extra=request.extra,
        program=PROGRAM,
        remote=Remote(placement.hosts, agent, machines, network),
    )
    return Plan(variables | request.engine.settings(directory), command, files)
