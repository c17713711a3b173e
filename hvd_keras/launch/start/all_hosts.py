"""Whether a host fits the job before it starts; and what is cleaned up on all hosts after it."""

import asyncio
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_keras.launch.errors import say
from hvd_keras.launch.onhost import sweep
from hvd_keras.launch.start.remote_shell import Answer, Reach, ask_all

# What must be equal on all hosts.
_EQUAL = {name: name.lower() for name in ("Python", "hvd_keras", "TensorFlow", "Keras")}
_EQUAL["hvd_keras in"] = "place"


def difference(
    theirs: Mapping[str, Any], own: Mapping[str, Any], directory: str, program: str
) -> str:
    """Return why a host with these facts cannot take part; empty if it can."""
    for name, fact in _EQUAL.items():
        got, expected = theirs[fact], own[fact]
        if got != expected:
            has = f"has {name} {got}" if got else f"has no {name}"
            return f"{has}; expected {expected}, as here"
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
