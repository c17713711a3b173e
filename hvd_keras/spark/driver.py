"""The driver's end of the tasks' connections."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator

from hvd_keras.launch.onhost.channel import Link, ProtocolError


class Tasks:
    """The tasks of one barrier stage, as their connections show them.

    Attributes:
        started: those that were granted their start.
        ended: those that ended well.
        failure: how the first of the others ended; empty while none has.
    """

    def __init__(self, secret: str) -> None:
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self.failure = ""
        self._secret = secret
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def listening(self, address: str) -> Iterator[int]:
        """Accept the tasks' connections on an address of this host; yields the port."""
        with socket.create_server((address, 0)) as listener:
            thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
            thread.start()
            try:
                yield listener.getsockname()[1]
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # which ends the wait for the next one
                thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._follow, args=(connection,), daemon=True).start()

    def _follow(self, connection: socket.socket) -> None:
        with connection:
            try:
                link = Link(connection, self._secret, listens=True)
            except (ProtocolError, OSError):
                return
            hello = link.receive()
            if hello is None:
                return
            number = hello["task"]
            with self._lock:
                if number in self.started or self.failure:
                    return
                self.started.add(number)
            with contextlib.suppress(OSError):
                link.send(go=True)
            ending = f"task {number} on {hello['host']} was lost, or its executor"
            while message := link.receive():
                if "line" in message:
                    print(message["line"], end="", flush=True, file=getattr(sys, message["to"]))
                elif "error" in message:
                    ending = f"task {number} on {hello['host']} failed:\n{message['error']}"
                else:
                    self.ended.add(number)
            with self._lock:
                if number not in self.ended and not self.failure:
                    self.failure = ending
