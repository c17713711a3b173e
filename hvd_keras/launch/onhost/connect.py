"""How a worker reaches hvdrun: over TCP, or at a Unix socket of the same host."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from .channel import error_text
from .limits import CONNECT_TIMEOUT, REACH_TIMEOUT


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder, because a socket's address has at most 107 characters."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _connect_to(address: str) -> socket.socket:
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        path = Path(address)
        with in_folder(path.parent) as folder:
            connection.connect(f"{folder}/{path.name}")
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), CONNECT_TIMEOUT)


def connect(addresses: str) -> socket.socket:
    """Connect to hvdrun at the first of its addresses that answers."""
    limit = time.monotonic() + REACH_TIMEOUT
    problems: dict[str, str] = {}
    while time.monotonic() < limit:
        for address in [addresses] if addresses.startswith("/") else addresses.split(","):
            try:
                return _connect_to(address)
            except OSError as error:
                problems[address] = error_text(error)
        time.sleep(0.5)
    told = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
    raise SystemExit(
        f"hvdrun: {socket.gethostname()} cannot connect to hvdrun: {told}; check that no "
        "firewall blocks connections between the job's hosts"
    )
