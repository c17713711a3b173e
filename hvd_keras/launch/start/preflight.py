"""Checks all hosts at once, before a job starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_keras.launch.onhost import host_facts as probe
from hvd_keras.launch.onhost.limits import ANSWER_TIMEOUT
from hvd_keras.launch.start.hosts import Host
from hvd_keras.launch.start.remote_shell import Reach, answer, last_line, run_on_all

# Exit statuses of a shell that could not run the program.
_NO_PROGRAM = (126, 127)


@dataclass(frozen=True)
class Look:
    """The facts of each host that answered, and the problems found, by host name.

    Hosts in `away` could not be reached; each has a problem.
    """

    facts: Mapping[str, Mapping[str, Any]]
    problems: Mapping[str, str]
    away: Set[str]


async def look(hosts: Sequence[Host], reach: Reach, directory: str, program: str) -> Look:
    """Ask each host for its facts and compare them with ours."""
    text = Path(probe.__file__).read_text()
    command = [sys.executable, "-I", "-", directory, program]
    facts: dict[str, Mapping[str, Any]] = {}
    problems: dict[str, str] = {}
    away: set[str] = set()
    own = probe.look(directory, program)
    names = [host.name for host in hosts]
    for name, done in (await run_on_all(names, reach, command, text)).items():
        if done is None:
            problems[name] = f"did not answer within {ANSWER_TIMEOUT:.0f} s"
            away.add(name)
            continue
        told = answer(done.stdout, probe.MARK)
        if told is not None:
            facts[name] = json.loads(told)
            if problem := difference(facts[name], own, directory, program):
                problems[name] = problem
        else:
            unreachable = reach.failure(done.returncode, done.stderr)
            problems[name] = unreachable or _failure(done.returncode, done.stderr)
            if unreachable:
                away.add(name)
    _find_twins(facts, problems)
    return Look(facts, problems, away)


def _failure(status: int, err: str) -> str:
    if status in _NO_PROGRAM:
        return f"has no {sys.executable}; expected the same Python at the same path on all hosts"
    return f"cannot run {sys.executable}: exit status {status}: {last_line(err)}"


def difference(
    theirs: Mapping[str, Any], own: Mapping[str, Any], directory: str, program: str
) -> str | None:
    """Return why a host with these facts cannot take part, or None if it can."""
    for what, name in (
        ("python", "Python"),
        ("hvd_keras", "hvd_keras"),
        ("tensorflow", "TensorFlow"),
        ("keras", "Keras"),
    ):
        if theirs[what] != own[what]:
            got = f"has {name} {theirs[what]}" if theirs[what] else f"has no {name}"
            return f"{got}; expected {own[what]}, as here"
    if theirs["place"] != own["place"]:
        return f"has hvd_keras in {theirs['place']}; expected {own['place']}, as here"
    if not theirs["directory"]:
        return f"has no folder {directory}; expected the folder in which hvdrun was started"
    if not theirs["program"]:
        return f"has no program {program}; expected it at the same path on all hosts"
    return None


def _find_twins(facts: Mapping[str, Mapping[str, Any]], problems: dict[str, str]) -> None:
    """Find hosts with the same host name: MPI would assume that they share memory."""
    owners: dict[str, str] = {}
    for name, own in facts.items():
        twin = owners.setdefault(own["host"], name)
        if twin != name and name not in problems:
            problems[name] = (
                f"calls itself {own['host']!r}, as {twin} does; expected distinct host names "
                "(see `hostname`), or one entry if both are the same host"
            )
