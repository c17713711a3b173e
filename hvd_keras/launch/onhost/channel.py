"""Authenticated connections between hvdrun and the ranks' workers, over TCP or a Unix socket.

Both ends know the job's secret. They prove it first, each way, without showing it; after that each
message is JSON, with its length before it. Nothing is encrypted, and messages are not signed: who
can change what travels between the hosts is outside the threat model (see SECURITY.md).

    both ends   the greeting and a nonce
    both ends   a code of both nonces and of who sends it
    both ends   messages
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Generator, Mapping
from pathlib import Path
from typing import Any

from hvd_keras.runtime.linux import in_folder

from .limits import CONNECT_TIMEOUT, PROBE_INTERVAL, REACH_TIMEOUT, TRY_AGAIN

GREETING = b"hvdrun 4 "

NONCE, PROOF = 32, 64  # bytes of a nonce and of a proof, in hexadecimal digits

HEAD = struct.Struct("!I")  # the length of a message
LIMIT = 1 << 24  # bytes of a message at most

PIECE = 1 << 16  # bytes of a rank's output or input, or of a pickle, in one message

# The place of tcpi_last_data_recv and tcpi_last_ack_recv, in milliseconds, in Linux's tcp_info.
_LAST_RECEIVED = 52


class ProtocolError(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


def new_secret() -> str:
    """Return a secret for one job: 256 bits as text."""
    return secrets.token_hex(32)


def prove(secret: str, is_hvdrun: bool) -> Generator[tuple[bytes, int], bytes, None]:
    """Yield what to send, and how many bytes to `send` here of the answer; 0 at the end."""
    own = GREETING + secrets.token_hex(NONCE // 2).encode()
    other = yield own, len(own)
    if not other.startswith(GREETING):
        raise ProtocolError("the other end does not speak this version of the protocol")
    nonces = own + other if is_hvdrun else other + own
    codes = [
        hmac.digest(secret.encode(), who + nonces, "sha256").hex().encode()
        for who in (b"hvdrun", b"worker")
    ]
    got = yield codes[not is_hvdrun], PROOF
    if not hmac.compare_digest(got, codes[is_hvdrun]):
        raise ProtocolError("the other end does not know this job's secret")
    yield b"", 0


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    data = json.dumps(message).encode()
    return HEAD.pack(len(data)) + data


def unpack_length(head: bytes) -> int:
    """Return how long the message after this head is. Raises ProtocolError."""
    (length,) = HEAD.unpack(head)
    if length > LIMIT:
        raise ProtocolError("a message is too long")
    return int(length)


class Connection:
    """A connection over asyncio's streams. `hello` is sent as soon as both ends are proved."""

    def __init__(
        self,
        secret: str,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        listens: bool,
        hello: Mapping[str, Any] | None = None,
    ) -> None:
        self._proof, (self._reader, self._writer) = prove(secret, listens), streams
        self._hello, self._is_open = hello, False
        self._sending = asyncio.Lock()
        self.socket: socket.socket = self._writer.get_extra_info("socket")
        self.heard = time.monotonic()
        watch_liveness(self.socket)

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Prove ourselves, then yield what arrives. Raises ProtocolError or OSError."""
        with contextlib.suppress(asyncio.IncompleteReadError):  # the other end has closed
            data, count = next(self._proof)
            self._writer.write(data)
            while count:
                data, count = self._proof.send(await self._reader.readexactly(count))
                self._writer.write(data)
            self._is_open = True
            if self._hello is not None:
                self.send(hello=self._hello)
            while True:
                length = unpack_length(await self._reader.readexactly(HEAD.size))
                message = json.loads(await self._reader.readexactly(length))
                self.heard = time.monotonic()
                yield message

    def send(self, **message: Any) -> None:
        """Send a message, unless the other end is gone or has not proved itself."""
        if self._is_open and not self._writer.transport.is_closing():
            self._writer.write(pack(message))

    async def send_much(self, **message: Any) -> None:
        """Send a long message and wait until most of it has gone, or the other end is gone."""
        self.send(**message)
        async with self._sending:
            with contextlib.suppress(OSError):
                await self._writer.drain()

    def end(self) -> None:
        """Close the connection immediately."""
        self._writer.transport.abort()


def watch_liveness(connection: socket.socket) -> None:
    """Enable TCP keep-alives: only a host or a network that is gone is silent then."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, PROBE_INTERVAL)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 60)  # `silence` decides


def silence(connection: socket.socket) -> float:
    """Seconds since something was last received from the other host."""
    if connection.family == socket.AF_UNIX:
        return 0.0
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    # Data that acknowledges nothing new counts as data alone.
    return float(min(struct.unpack_from("II", information, _LAST_RECEIVED))) / 1000


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
                problems[address] = error.strerror or str(error)
        time.sleep(TRY_AGAIN)
    reasons = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
    raise SystemExit(
        f"hvdrun: {socket.gethostname()} cannot connect to hvdrun: {reasons}; check that no "
        "firewall blocks connections between the job's hosts"
    )
