"""Authenticated connections between hvdrun and the ranks' workers.

Both ends know the job's secret. The first lines prove it, each way, without showing it; after that
each line is a message in JSON. Nothing is encrypted, and lines are not signed: who can change what
travels between the hosts is outside the threat model (see SECURITY.md).

    hvdrun -> worker   the greeting and a nonce
    worker -> hvdrun   a nonce and the code of both nonces
    hvdrun -> worker   another code of both nonces
    then, both ways    JSON
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from typing import Any

GREETING = b"hvdrun 2 "

# Characters of a nonce and of a proof.
NONCE = 32
PROOF = 64

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


class Channel:
    """One end of a connection, without the connection: turns bytes into messages and back.

    `greeting()` gives the first bytes to send, `feed` takes what arrives and gives the messages in
    it, and `take` gives what is to be sent.
    """

    def __init__(self, secret: str, is_hvdrun: bool) -> None:
        self._secret = secret.encode()
        self._is_hvdrun = is_hvdrun
        self._nonce = secrets.token_hex(NONCE // 2).encode()
        self._arrived = bytearray()
        self._outgoing = bytearray(GREETING + self._nonce + b"\n" if is_hvdrun else b"")
        self._nonces = b""
        self.open = False  # whether both ends have proved that they know the secret

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take what has arrived; returns the messages that it completes.

        Raises ProtocolError if it cannot come from the other end of this job.
        """
        self._arrived += data
        messages = []
        while (end := self._arrived.find(b"\n")) >= 0:
            line = bytes(self._arrived[:end])
            del self._arrived[: end + 1]
            if self.open:
                messages.append(json.loads(line))
            elif self._is_hvdrun:
                self._take_proof(line)
            else:
                self._take_greeting(line)
        if len(self._arrived) > (LIMIT if self.open else FIRST_LIMIT):
            raise ProtocolError("a message is too long")
        return messages

    def _take_greeting(self, line: bytes) -> None:
        if not self._nonces:
            nonce = line.removeprefix(GREETING)
            if not line.startswith(GREETING) or len(nonce) != NONCE:
                raise ProtocolError("the peer is not hvdrun, or speaks another protocol version")
            self._nonces = nonce + b" " + self._nonce
            proof = _code(self._secret, b"worker", self._nonces)
            self._outgoing += self._nonce + b" " + proof + b"\n"
        else:
            self._check(line, _code(self._secret, b"hvdrun", self._nonces))
            self.open = True

    def _take_proof(self, line: bytes) -> None:
        nonce, _, proof = line.partition(b" ")
        if len(nonce) != NONCE or len(proof) != PROOF:
            raise ProtocolError("not a worker of hvdrun")
        self._nonces = self._nonce + b" " + nonce
        self._check(proof, _code(self._secret, b"worker", self._nonces))
        self.open = True
        self._outgoing += _code(self._secret, b"hvdrun", self._nonces) + b"\n"

    def _check(self, got: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(got, expected):
            raise ProtocolError("the other end does not know this job's secret")

    def put(self, **message: Any) -> None:
        """Queue a message; only when `open`."""
        self._outgoing += json.dumps(message).encode() + b"\n"

    def take(self) -> bytes:
        """Take what waits to be sent."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data


def watch_liveness(connection: socket.socket) -> None:
    """Enable TCP keep-alives, so that `silence` works while nothing else is sent.

    They answer for a process that is stopped or busy, too: only a host or a network that is gone is
    silent.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 60)  # `silence` decides
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def silence(connection: socket.socket) -> float:
    """Seconds since something was last received from the other host."""
    if connection.family == socket.AF_UNIX:
        return 0.0
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    # Data that acknowledges nothing new counts as data alone.
    return float(min(struct.unpack_from("II", information, _LAST_RECEIVED))) / 1000


def error_text(error: OSError) -> str:
    """Describe an error without its number."""
    return os.strerror(error.errno) if error.errno else str(error)
