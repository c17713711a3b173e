"""A connection as between hvdrun and its workers, but blocking."""

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hvd_keras.launch.onhost.channel import (
    HEAD,
    ProtocolError,
    pack,
    prove,
    unpack_length,
    watch_liveness,
)
from hvd_keras.launch.onhost.limits import PROOF_TIMEOUT, SILENCE


class Link:
    """A blocking connection, of agents, their clients, and Spark's tasks.

    `listens` tells that this is the listener's end. Raises ProtocolError or OSError if the other
    end does not prove that it knows the secret. Any number of threads may send, one may receive.
    """

    def __init__(self, connection: socket.socket, secret: str, *, listens: bool) -> None:
        self._connection, self._lock = connection, threading.Lock()
        watch_liveness(connection)
        # A host that is silent for this long counts as lost, to senders and receivers.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENCE))
        connection.settimeout(PROOF_TIMEOUT)
        proof = prove(secret, listens)
        data, count = next(proof)
        connection.sendall(data)
        while count:
            data, count = proof.send(self._read(count))
            connection.sendall(data)
        connection.settimeout(None)

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (piece := self._connection.recv(count - len(data))):
                raise ProtocolError("the other end has closed the connection")
            data += piece
        return data

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        with self._lock:
            self._connection.sendall(pack(message))

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None if the other end has closed or is lost."""
        try:
            message: dict[str, Any] = json.loads(self._read(unpack_length(self._read(HEAD.size))))
        except (ProtocolError, OSError):
            return None
        return message

    def close(self) -> None:
        """Close the connection; the other end receives None."""
        with contextlib.suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, socket.SOMAXCONN


@contextlib.contextmanager
def listening(
    address: str, secret: str, talk: Callable[[Link, dict[str, Any]], None]
) -> Iterator[int]:
    """Listen on an address of this host, and yield the port.

    For each who proves to know the secret, a thread calls `talk` with the link and the first
    message; the connection ends with the call.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            try:
                link = Link(self.request, secret, listens=True)
            except (ProtocolError, OSError):
                return
            if (first := link.receive()) is not None:
                talk(link, first)

    with _Server((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.1], daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
