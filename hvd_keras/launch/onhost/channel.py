"""Authenticated connections between hvdrun and the ranks' workers, over TCP or a Unix socket.

Both ends know the job's secret. The first lines prove it, each way, without showing it; after that
each line is a message in JSON. Nothing is encrypted, and lines are not signed: who can change what
travels between the hosts is outside the threat model (see SECURITY.md).

    hvdrun -> worker   the greeting and a nonce
    worker -> hvdrun   a nonce and the code of both nonces
    hvdrun -> worker   another code of both nonces
    then, both ways    JSON
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from .limits import CONNECT_TIMEOUT, PROOF_TIMEOUT, REACH_TIMEOUT, SILENCE

GREETING = b"hvdrun 2 "

# Characters of a nonce and of a proof.
NONCE, PROOF = 32, 64

# Bytes of a line at most: before and after the other end has proved that it knows the secret.
FIRST_LIMIT = 256
LIMIT = 1 << 24

# Bytes of a rank's output or input in one message.
PIECE = 1 << 16

# Bytes of a pickle in one message.
LARGE_PIECE = 1 << 20


# The place of tcpi_last_data_recv and tcpi_last_ack_recv, in milliseconds, in Linux's tcp_info.
_LAST_RECEIVED = 52


class ProtocolError(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


def new_secret() -> str:
    """Return a secret for one job: 256 bits as text."""
    return secrets.token_hex(32)


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"\0".join(parts), hashlib.sha256).hexdigest().encode()


def _check(got: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(got, expected):
        raise ProtocolError("the other end does not know this job's secret")


class Channel:
    """One end of a connection, without the connection: turns bytes into messages and back."""

    def __init__(self, secret: str, is_hvdrun: bool) -> None:
        self._arrived = bytearray()
        self._outgoing = bytearray()
        self._proof = self._prove(secret.encode(), is_hvdrun)
        self.open = False  # whether both ends have proved that they know the secret
        next(self._proof)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take what has arrived; returns the messages that it completes. Raises ProtocolError."""
        self._arrived += data
        messages = []
        while (end := self._arrived.find(b"\n")) >= 0:
            line = bytes(self._arrived[:end])
            del self._arrived[: end + 1]
            if self.open:
                messages.append(json.loads(line))
            else:
                self.open = self._proof.send(line)
        if len(self._arrived) > (LIMIT if self.open else FIRST_LIMIT):
            raise ProtocolError("a message is too long")
        return messages

    def _prove(self, key: bytes, is_hvdrun: bool) -> Generator[bool, bytes, None]:
        """Take the first lines and queue ours; yields whether the other end is proved."""
        own = secrets.token_hex(NONCE // 2).encode()
        if is_hvdrun:
            self._outgoing += GREETING + own + b"\n"
            nonce, _, proof = (yield False).partition(b" ")
            if len(nonce) != NONCE or len(proof) != PROOF:
                raise ProtocolError("not a worker of hvdrun")
            nonces = own + b" " + nonce
            _check(proof, _code(key, b"worker", nonces))
            self._outgoing += _code(key, b"hvdrun", nonces) + b"\n"
        else:
            greeting = yield False
            nonce = greeting.removeprefix(GREETING)
            if nonce == greeting or len(nonce) != NONCE:
                raise ProtocolError("the peer is not hvdrun, or speaks another protocol version")
            nonces = nonce + b" " + own
            self._outgoing += own + b" " + _code(key, b"worker", nonces) + b"\n"
            _check((yield False), _code(key, b"hvdrun", nonces))
        yield True

    def put(self, **message: Any) -> None:
        """Queue a message; only when `open`."""
        self._outgoing += json.dumps(message).encode() + b"\n"

    def take(self) -> bytes:
        """Take what waits to be sent."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data


class Link:
    """A channel over a socket, for those who can wait: agents, their clients, and Spark's tasks.

    `listens` tells that this is the listener's end. Raises ProtocolError or OSError if the other
    end does not prove that it knows the secret. Any number of threads may send, one may receive.
    """

    def __init__(self, connection: socket.socket, secret: str, *, listens: bool) -> None:
        self._connection = connection
        self._channel = Channel(secret, is_hvdrun=listens)
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        watch_liveness(connection)
        # A host that is silent for so long is lost, for those who send and those who wait.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENCE))
        connection.settimeout(PROOF_TIMEOUT)
        connection.sendall(self._channel.take())
        while not self._channel.open:
            if not (data := connection.recv(PIECE)):
                raise ProtocolError("the other end has closed the connection")
            self._messages += self._channel.feed(data)
            connection.sendall(self._channel.take())
        connection.settimeout(None)

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        with self._lock:
            self._channel.put(**message)
            self._connection.sendall(self._channel.take())

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None if the other end has closed or is lost."""
        while not self._messages:
            try:
                data = self._connection.recv(PIECE)
            except OSError:
                data = b""
            if not data:
                return None
            self._messages += self._channel.feed(data)
        return self._messages.pop(0)

    def close(self) -> None:
        """Close the connection; the other end receives None."""
        with contextlib.suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Connection:
    """A channel over asyncio's streams. `hello` is sent as soon as both ends are proved."""

    def __init__(
        self,
        channel: Channel,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        hello: Mapping[str, Any] | None = None,
    ) -> None:
        self._channel, (self._reader, self._writer), self._hello = channel, streams, hello
        self._sending = asyncio.Lock()
        self.socket: socket.socket = self._writer.get_extra_info("socket")
        self.heard = time.monotonic()
        watch_liveness(self.socket)

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Prove ourselves, then yield what arrives. Raises ProtocolError or OSError."""
        self._writer.write(self._channel.take())
        while data := await self._reader.read(PIECE):
            self.heard = time.monotonic()
            messages = self._channel.feed(data)
            if self._channel.open and self._hello is not None:
                self._channel.put(hello=self._hello)
                self._hello = None
            self._writer.write(self._channel.take())
            for message in messages:
                yield message

    def send(self, **message: Any) -> None:
        """Send a message, unless the other end is gone or has not proved itself."""
        if self._channel.open and not self._writer.transport.is_closing():
            self._channel.put(**message)
            self._writer.write(self._channel.take())

    async def send_much(self, **message: Any) -> None:
        """Send a long message and wait until most of it has gone. Raises OSError."""
        self.send(**message)
        async with self._sending:
            await self._writer.drain()

    @property
    def busy(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._writer.transport.get_write_buffer_size())

    def end(self) -> None:
        """Close the connection immediately."""
        self._writer.transport.abort()


def watch_liveness(connection: socket.socket) -> None:
    """Enable TCP keep-alives: only a host or a network that is gone is silent then."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_NODELAY"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 60)  # `silence` decides


def silence(connection: socket.socket) -> float:
    """Seconds since something was last received from the other host."""
    if connection.family == socket.AF_UNIX:
        return 0.0
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    # Data that acknowledges nothing new counts as data alone.
    return float(min(struct.unpack_from("II", information, _LAST_RECEIVED))) / 1000


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder, because a socket's address has at most 107 characters."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def error_text(error: OSError) -> str:
    """Describe an error without its number."""
    return os.strerror(error.errno) if error.errno else str(error)


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
