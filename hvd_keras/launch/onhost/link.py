"""A `Channel` over a socket, for those who can wait: agents, their clients, and Spark's tasks."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from .channel import PIECE, Channel, ProtocolError, watch_liveness
from .limits import PROOF_TIMEOUT, SILENCE


class Link:
    """One end of an authenticated connection; `listens` tells that it is the listener's.

    Raises ProtocolError or OSError if the other end does not prove that it knows the secret. Any
    number of threads may send, one may receive.
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
            data = connection.recv(PIECE)
            if not data:
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
                return None
            if not data:
                return None
            self._messages += self._channel.feed(data)
        return self._messages.pop(0)

    def close(self) -> None:
        """Close the connection; the other end receives None."""
        with contextlib.suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
