"""This host's addresses and networks on the routes to the hosts of a job."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence

from hvd_keras.launch.errors import UsageError, refusing
from hvd_keras.launch.start import hosts
from hvd_keras.launch.start.hosts import Host

# ioctl requests of Linux: an interface's address and netmask.
_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B


def own_addresses(interface: str | None, names: Sequence[str]) -> list[str]:
    """Return this host's addresses on the routes to these hosts. Raises UsageError."""
    if interface is not None:
        return [str(_interface(interface).ip)]
    others = [name for name in names if not hosts.is_here(name)] or [socket.gethostname()]
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
            address = ipaddress.ip_address(socket.gethostbyname(host.name))
            if not hosts.is_here(host.name):
                near = [own for own in _interfaces().values() if address in own.network]
                found.add(str(near[0].network) if near else None)
    except OSError:
        return None
    return found.pop() if len(found) == 1 else None


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
