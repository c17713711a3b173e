"""SLURM on the hosts of tests.harness.hosts: a controller on the first one, and a node each."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tests.harness import cluster
from tests.harness.hosts import Host, Hosts
from tests.harness.launcher import LIMIT

_TOOLS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "salloc": "slurm-client",
}

# More cores than this machine may have, as only SLURM's book-keeping is of interest here.
CORES = 4

# Seconds without an answer after which SLURM takes a node for lost.
LOST = 10

_CONF = """\
ClusterName=hosts
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout={lost}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
TmpFS={folder}/%n
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str | None:
    """Why there is no SLURM here, or None."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    packages = [p for tool, p in _TOOLS.items() if shutil.which(tool, path=path) is None]
    if not list(pathlib.Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")):
        packages.append("libpmix-dev")  # srun opens it
    return f"not installed: {', '.join(packages)}" if packages else None


class Slurm:
    """Runs while its context does. `settings` are needed by who talks to it."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._daemons: list[tuple[Host, subprocess.Popen[Any]]] = []

    def __enter__(self) -> Slurm:
        # The hosts' end removes it: what runs a job's step tidies up here after its job is over.
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-", dir=self.hosts.folder))
        self.settings = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host, daemon in reversed(self._daemons):
            with contextlib.suppress(AssertionError):  # it has ended
                host.signal(daemon, 9)
            daemon.wait(timeout=LIMIT)
        for host in self.hosts:  # the last step's daemon may still be about to end
            host.clear()

    def _start(self) -> None:
        folder = self._folder
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={CORES}" for host in self.hosts
        )
        conf = _CONF.format(first=self.hosts[0].name, lost=LOST, folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(conf)
        (folder / "state").mkdir()
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        for host in self.hosts:
            (folder / host.name).mkdir()
            host.run(["mkdir", "-p", "/run/munge"])
            files = {name: folder / f"{host.name}.munge-{name}" for name in ("log", "pid", "seed")}
            words = [f"--{name}-file={path}" for name, path in files.items()]
            self._daemon(host, "munged", "--foreground", f"--key-file={key}", *words)
        self._daemon(self.hosts[0], "slurmctld", "-D", "-i")
        for host in self.hosts:
            self._daemon(host, "slurmd", "-D", "-N", host.name)
        self.await_nodes()

    def _daemon(self, host: Host, *command: str) -> None:
        with (self._folder / f"{host.name}.{command[0]}.out").open("wb") as out:
            env = os.environ | self.settings
            process = host.start(command, env=env, stdout=out, stderr=out, cwd="/")
        self._daemons.append((host, process))

    def await_nodes(self) -> None:
        """Wait until no node has anything to do or is lost."""
        limit = time.monotonic() + LIMIT
        while self.states() != {host.name: "idle" for host in self.hosts}:
            told = {p.name: p.read_text() for p in self._folder.iterdir() if p.suffix == ".log"}
            assert time.monotonic() < limit, f"not all nodes are idle: {self.states()} {told}"
            time.sleep(0.2)

    def states(self) -> dict[str, str]:
        """What SLURM says of each node: "idle", "alloc", "down" and so on."""
        done = self.run(["sinfo", "-h", "-N", "-o", "%N %T"], self._folder)
        return dict(line.split() for line in done.stdout.splitlines())

    def run(
        self, command: Sequence[str], folder: pathlib.Path, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, in a folder, to its end."""
        env = options.pop("env", None) or cluster.environment()
        options = {"timeout": cluster.LIMIT, **options}
        return self.hosts[0].run(command, cwd=folder, env=env | self.settings, **options)

    def started(
        self, allocation: Sequence[str], *arguments: str, folder: pathlib.Path, env: Any = None
    ) -> contextlib.AbstractContextManager[cluster.Running]:
        """A hvdrun on the first host, in an allocation, which ends with this context."""
        env = (env or cluster.environment()) | self.settings
        return cluster.started(
            self.hosts, *arguments, folder=folder, env=env, allocation=allocation
        )

    def left(self) -> dict[str, list[str]]:
        """What runs or lies on the hosts, by their names, without SLURM itself."""
        own = re.compile(r"munged |slurmctld |slurmd |: slurmscriptd|slurmstepd: ")
        found = {}
        for host in self.hosts:
            lines = [line for line in host.processes().values() if not own.match(line)]
            if left := lines + host.leftovers():
                found[host.name] = left
        return found
