"""Checks all hosts of a job at once before it starts, and cleans them up after it."""

import asyncio
import json
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_keras.launch.errors import say
from hvd_keras.launch.onhost import host_facts, sweep
from hvd_keras.launch.start.hosts import Host
from hvd_keras.launch.start.remote_shell import Answer, Reach, ask_all

# What must have the same version on all hosts.
_PROGRAMS = ("Python", "hvd_keras", "TensorFlow", "Keras")

Facts = Mapping[str, Mapping[str, Any]]  # what `host_facts` says of each host


@dataclass(frozen=True)
class Look:
    """What was found, by host name."""

    facts: Facts  # of each host that answered
    problems: Mapping[str, str]
    away: Sequence[str]  # hosts that could not be reached; each has a problem
    hosts: Sequence[Host]  # those without problems, with the number of ranks that each takes


async def look(
    hosts: Sequence[Host],
    reach: Reach,
    program: str,
    per_host: int | None,
    known: Facts,
    *,
    by_gpus: bool,
) -> Look:
    """Ask each host for its facts, unless they are `known`, and compare them with ours.

    A host that has no number of ranks gets `per_host`, or one for each GPU or core there.
    """
    directory = os.getcwd()
    names = [host.name for host in hosts if host.name not in known]
    answers = await ask_all(names, reach, host_facts, ["-I", "-", directory, program])
    facts = {host.name: known[host.name] for host in hosts if host.name in known}
    facts |= {name: json.loads(answer.text) for name, answer in answers.items() if answer.text}
    own = host_facts.look(directory, program)
    problems = {
        name: problem
        for name, answer in answers.items()
        if (problem := answer.problem or difference(facts[name], own, directory, program))
    }
    owners: dict[str, str] = {}
    for name, theirs in facts.items():
        twin = owners.setdefault(theirs["host"], name)
        if twin != name and name not in problems:  # MPI would assume that they share memory
            problems[name] = (
                f"calls itself {theirs['host']!r}, as {twin} does; expected distinct host names "
                "(see `hostname`), or one entry if both are the same host"
            )
    away = sorted(name for name, answer in answers.items() if answer.away)
    fitting = [host for host in hosts if host.name not in problems]
    counted = []
    for host in fitting:
        gpus, cores = facts[host.name]["gpus"], facts[host.name]["cores"]
        ranks = host.slots or per_host or (by_gpus and gpus) or cores
        counted.append(Host(host.name, ranks))
    return Look(facts, problems, away, counted)


def difference(
    theirs: Mapping[str, Any], own: Mapping[str, Any], directory: str, program: str
) -> str:
    """Return why a host with these facts cannot take part; empty if it can."""
    for name in _PROGRAMS:
        got, expected = theirs[name.lower()], own[name.lower()]
        if got != expected:
            has = f"has {name} {got}" if got else f"has no {name}"
            return f"{has}; expected {expected}, as here"
    if theirs["place"] != own["place"]:
        return f"has hvd_keras in {theirs['place']}; expected {own['place']}, as here"
    if not theirs["directory"]:
        return f"has no folder {directory}; expected the folder in which hvdrun was started"
    if not theirs["program"]:
        return f"has no program {program}; expected it at the same path on all hosts"
    return ""


@dataclass
class Remains:
    """What may be left of a job, and on which hosts."""

    reach: Reach
    is_local: bool = False  # on this host alone
    starts: list[str] = field(default_factory=list)  # the numbers of the job's starts
    # The number of the servers that have the ranks' imports ready.
    server: str = field(default_factory=lambda: secrets.token_hex(8))
    hosts: set[str] = field(default_factory=set)  # of all starts
    lost: set[str] = field(default_factory=set)  # of these, what could not be reached after one

    async def sweep(
        self, names: Collection[str], grace: float = 0.0, *, servers: bool = False
    ) -> set[str]:
        """Kill processes and remove files on these hosts; returns those that are lost."""
        jobs = [*self.starts, *[self.server] * servers]
        if self.is_local:
            stuck = await asyncio.to_thread(sweep.sweep, jobs, grace)
            answers = {"": Answer(" ".join(map(str, stuck)))}
        else:
            answers = await ask_all(names, self.reach, sweep, ["-I", "-S", "-", str(grace), *jobs])
        for name, answer in answers.items():
            where = f"{name}: " if name else ""
            if answer.problem and not answer.away:
                say(f"{where}the clean-up failed: it {answer.problem}")
            if answer.text:
                processes = ", ".join(answer.text.split())
                say(f"{where}cannot kill process {processes} of the job")
        lost = {name for name, answer in answers.items() if answer.away}
        self.lost = self.lost - set(names) | lost
        return lost
