"""Which hosts a job runs on, how many ranks each takes, and the networks to them."""

import contextlib
import fcntl
import ipaddress
import os
import re
import shlex
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_keras.launch.errors import AwayError, UsageError, refusing
from hvd_keras.launch.onhost.cores import usable_cores
from hvd_keras.launch.start.command import ask

# A host name or an IPv4 address; it cannot be taken for an option of ssh. DNS allows 1 to 63
# characters between two dots.
_NAME = re.compile(r"(?!.*[^.]{64}|.*\.\.)[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_EXAMPLE = "server1:4,server2:4"

# "server[1-3,08-10]:4" is server1:4, server2:4, server3:4, server08:4, server09:4, server10:4.
_RANGE = re.compile(r"([^\[\]]*)\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]([^\[\]]*)", re.ASCII)
MOST_HOSTS = 10_000

# ioctl requests of Linux: an interface's address and netmask.
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B

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


def parse(text: str) -> list[Host]:
    """Parse the value of `-H`."""
    return parse_lines(re.sub(r",(?![^\[]*\])", "\n", text), "-H", is_file=False)


def parse_lines(text: str, origin: str, *, is_file: bool = True) -> list[Host]:
    """Parse one host per line: "server1", "server1:4" or "server1 slots=4".

    In a file, "#" begins a comment. PBS, LSF and SGE write a host once per slot there, so if a name
    comes twice, each line is a slot. SGE has "server1 4 all.q@server1 UNDEFINED", too; Open MPI's
    files may have "max_slots=4".
    """
    hosts: list[Host] = []
    for line in text.splitlines():
        entry = " ".join((line.partition("#")[0] if is_file else line).split())
        entry = re.sub(r" max[_-]slots ?= ?\d+", "", entry)
        entry = re.sub(r" (?:slots ?= ?(\S+)|(\d+)(?: \S+){0,2})$", r":\1\2", entry)
        if " " in entry:
            raise UsageError(
                f"{origin} has the line {line!r}; expected server1, server1:4 or server1 slots=4"
            )
        hosts += _hosts(entry, origin) if entry else []
    if not hosts:
        raise AwayError(f"{origin} lists no host; expected for example {_EXAMPLE}")
    slots = Counter[str]()
    for host in hosts:
        if host.name in slots and not is_file:
            raise UsageError(f"{origin} lists {host.name} twice; expected each host once")
        slots[host.name] += host.slots or 1
    return hosts if len(slots) == len(hosts) else [Host(*one) for one in slots.items()]


def read(path: str) -> list[Host]:
    """Read the hosts of `--hostfile`."""
    with refusing(f"--hostfile got {path!r}, which cannot be read"):
        text = Path(path).read_text(errors="replace")
    hosts = parse_lines(text, f"--hostfile {path}")
    # With one slot on each host, no name comes twice in these.
    if path in map(os.environ.get, ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")):
        hosts = [Host(host.name, host.slots or 1) for host in hosts]
    return hosts


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
            address = socket.gethostbyname(name)
            probe.bind((address, 0))  # works for own ones only, and for all with ip_nonlocal_bind
            probe.connect((address, 9))  # works from own ones only; sends nothing
        except OSError:
            return False
    return True


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
        return sum(host.slots or 0 for host in self.hosts)

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


def own_addresses(interface: str | None, names: Sequence[str]) -> list[str]:
    """Return this host's addresses on the routes to these hosts. Raises UsageError."""
    if interface is not None:
        return [str(_interface(interface).ip)]
    others = [name for name in names if not is_here(name)] or [socket.gethostname()]
    advice = "; hvdrun needs hosts with IPv4 addresses"
    found = set()
    with refusing(f"no route to one of {', '.join(names)}", advice):
        for name in others:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((socket.gethostbyname(name), 9))  # sends nothing
                found.add(probe.getsockname()[0])
    return sorted(found)


def common_network(wanted: Iterable[Host]) -> str | None:
    """Return our only network that contains all hosts; None without such a network."""
    # MPI must not try others: a container bridge, for example, has one address on all hosts.
    found = set()
    try:
        for host in wanted:
            if not is_here(host.name):
                address = ipaddress.ip_address(socket.gethostbyname(host.name))
                near = (own.network for own in _interfaces().values() if address in own.network)
                found.add(str(next(near, "")))
    except OSError:
        return None
    return (found.pop() or None) if len(found) == 1 else None


def _interfaces() -> dict[str, ipaddress.IPv4Interface]:
    """Return our addresses with their networks, by the names of interfaces."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(probe, number, request)[20:24])
                    for number in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
                found[name] = ipaddress.IPv4Interface(f"{address}/{mask}")
    return found


def _interface(text: str) -> ipaddress.IPv4Interface:
    """Return our address on a named interface or in an address range. Raises UsageError."""
    there = _interfaces()
    try:
        network = ipaddress.IPv4Network(text) if "/" in text else None
    except ValueError as error:
        raise UsageError(f"--network-interface got {text!r}: {error}") from error
    for name, own in there.items():
        if name == text or (network is not None and own.ip in network):
            return own
    known = ", ".join(f"{name} ({own})" for name, own in there.items())
    raise UsageError(
        f"--network-interface got {text!r}; expected an interface that has an address, or its "
        f"range: {known}"
    )
