"""The command that starts the ranks of a job, with its settings and files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_keras.launch import options
from hvd_keras.launch.job_spec import JobSpec
from hvd_keras.launch.onhost import process, worker
from hvd_keras.launch.onhost.cores import thread_settings, usable_cores
from hvd_keras.launch.start.all_hosts import Facts
from hvd_keras.launch.start.dialects import VARIABLES, Plan
from hvd_keras.launch.start.hosts import Host, count
from hvd_keras.launch.start.network import common_network

POSTMORTEM = "postmortem"  # the folder of the ranks' requests in the job's, unless the user has one


@dataclass(frozen=True)
class Placement:
    """The hosts of one start, with the number of ranks of each."""

    hosts: Sequence[Host]
    facts: Facts  # of the hosts, if they were asked; in a job here alone, of ""

    @property
    def names(self) -> dict[str, str]:
        """The user's names of the hosts, by the hosts' own."""
        return {facts["host"]: name for name, facts in self.facts.items()}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return count(self.hosts)

    def describe(self) -> str:
        """Describe it in words, such as "2 ranks on this host, 1 core each"."""
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        if "" not in self.facts:
            return f"{ranks} on {', '.join(map(str, self.hosts))}"
        cores = max(1, usable_cores() // self.size)
        each = " each" * (self.size != 1)
        return f"{ranks} on this host, {cores} core{'s' * (cores != 1)}{each}"


def rank_environment(spec: JobSpec, size: int, directory: Path, job: str) -> dict[str, str]:
    """Return what ranks get besides what depends on their host; here, besides our environment."""
    given, own = spec.options, os.environ
    memory = worker.memory_folder(job)
    settings: dict[str, str] = given.settings | spec.dialect.rank_settings(memory)
    if spec.dialect.library:
        settings["HVD_MPI_LIBRARY"] = spec.dialect.library
    if given.timeline is not None:
        settings["HVD_TIMELINE"] = str(Path(given.timeline).absolute())
    if given.strict:
        settings["HVD_STRICT"] = "1"
    if given.verbose:
        settings["HVDRUN_VERBOSE"] = "1"
    if given.stats or given.metrics is not None:
        settings["HVDRUN_STATISTICS"] = "1"
    if spec.is_local and given.postmortem is None:
        settings["HVDRUN_POSTMORTEM"] = str(directory / POSTMORTEM)
    if spec.is_local:
        return thread_settings(size, own, usable_cores()) | settings
    names = {name for name in own if name.startswith(options.PASSED_PREFIXES)}
    names |= {*options.PASSED, *given.env} & own.keys()
    return {name: own[name] for name in sorted(names)} | settings | {process.JOB: job}


def plan(
    spec: JobSpec, placement: Placement, directory: Path, job: str, secret: str, addresses: str
) -> Plan:
    """Plan how to start the ranks' workers."""
    given, dialect = spec.options, spec.dialect
    interface = given.network_interface
    made = Plan(
        placement.hosts,
        spec.is_local,
        directory,
        agent=spec.shell.agent(job, dialect.kills_workers),
        network=None if spec.is_local else interface or common_network(placement.hosts),
        oversubscribe=given.oversubscribe,
        extra=given.mpi_args,
        environment=rank_environment(spec, placement.size, directory, job),
        settings=dict(zip(VARIABLES, (job, addresses, secret), strict=True)),
    )
    dialect.complete(made)
    return made
