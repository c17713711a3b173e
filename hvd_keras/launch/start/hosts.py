"""Which hosts a job runs on, and how many ranks each takes."""

import re
import shlex
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost.cores import usable_cores
from hvd_keras.launch.start.command import ask

# A host name or an IPv4 address; it cannot be taken for an option of ssh. DNS allows 63 characters
# between two dots.
_NAME = re.compile(r"(?!.*[^.]{64})[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_EXAMPLE = "server1:4,server2:4"

# "server[1-3,08-10]:4" is server1:4, server2:4, server3:4, server08:4, server09:4, server10:4.
_RANGE = re.compile(r"([^\[\]]*)\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]([^\[\]]*)", re.ASCII)
MOST_HOSTS = 10_000

Facts = Mapping[str, Mapping[str, Any]]  # what `host_facts` says of each host


@dataclass(frozen=True)
class Host:
    """A host, by the name that the user gave, and its number of ranks; None: one per core."""

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def _hosts(text: str, origin: str) -> list[Host]:
    """Parse one entry, which may stand for several hosts."""
    entries = [text]
    if match := _RANGE.fullmatch(text):
        entries = []
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not 0 < len(numbers) <= MOST_HOSTS:
                raise UsageError(f"{origin} got {text!r}; expected ranges such as server[1-8]:4")
            entries += [f"{match[1]}{n:0{len(first)}}{match[3]}" for n in numbers]
    hosts = []
    for entry in entries:
        name, colon, slots = entry.partition(":")
        if not _NAME.fullmatch(name) or (colon and not re.fullmatch("0*[1-9][0-9]*", slots)):
            raise UsageError(
                f"{origin} got {entry!r}; expected a host name or IPv4 address, optionally with a "
                f"number of ranks, at least 1, as in {_EXAMPLE}"
            )
        hosts.append(Host(name, int(slots) if colon else None))
    return hosts


def _some(hosts: list[Host], origin: str) -> list[Host]:
    if not hosts:
        raise UsageError(f"{origin} lists no host; expected for example {_EXAMPLE}")
    return hosts


def parse(text: str) -> list[Host]:
    """Parse the value of `-H`."""
    parts = re.split(r",(?![^\[]*\])", text)
    hosts = [host for part in parts if part.strip() for host in _hosts(part.strip(), "-H")]
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise UsageError(f"-H lists {name} twice; expected each host once")
    return _some(hosts, "-H")


def parse_lines(text: str, origin: str) -> list[Host]:
    """Parse one host per line: "server1", "server1:4" or "server1 slots=4"; "#" is a comment.

    PBS, LSF and SGE write a host once per slot, so if a name comes twice, each line is a slot.
    SGE has "server1 4 all.q@server1 UNDEFINED", too; Open MPI's files may have "max_slots=4".
    """
    hosts: list[Host] = []
    for line in text.splitlines():
        entry = " ".join(line.partition("#")[0].split())
        entry = re.sub(r" max[_-]slots ?= ?\d+", "", entry)
        entry = re.sub(r" (?:slots ?= ?(\S+)|(\d+)(?: \S+){0,2})$", r":\1\2", entry)
        if " " in entry:
            raise UsageError(
                f"{origin} has the line {line!r}; expected server1, server1:4 or server1 slots=4"
            )
        hosts += _hosts(entry, origin) if entry else []
    slots = Counter[str]()
    for host in hosts:
        slots[host.name] += host.slots or 1
    if len(slots) < len(hosts):
        hosts = [Host(name, count) for name, count in slots.items()]
    return _some(hosts, origin)


def read(path: str) -> list[Host]:
    """Read the hosts of `--hostfile`."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile got {path!r}, which cannot be read: {error}") from error
    return parse_lines(text, f"--hostfile {path}")


async def discover(script: Sequence[str]) -> list[Host]:
    """Run the host discovery script and return the hosts that it prints."""
    name = f"--host-discovery-script {shlex.join(script)}"
    return parse_lines(await ask(script, name, "lines such as server1:4"), name)


def is_here(name: str) -> bool:
    """Whether this name refers to the host on which we run."""
    if name in ("localhost", socket.gethostname()):
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((socket.gethostbyname(name), 0))  # works for own addresses only
        except OSError:
            return False
    return True


def count(hosts: Sequence[Host]) -> int:
    """Return the number of slots, where that of each host is known."""
    return sum(host.slots or 0 for host in hosts)


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

    def share(self, size: int) -> "Placement":
        """Place so many ranks where there is room; all hosts get more if slots are too few."""
        left, chosen = size, []
        for host in self.hosts:
            room = -(-(host.slots or 0) * max(size, self.size) // self.size)
            if left > 0:
                chosen.append(Host(host.name, min(room, left)))
                left -= room
        facts = {host.name: self.facts[host.name] for host in chosen if self.facts}
        return Placement(chosen, facts)
