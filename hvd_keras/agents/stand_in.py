"""A rank that is another process, which mpirun has not started: a worker of Ray, or a notebook.

mpirun starts a stand-in for the rank, which hands its environment to that process on its host; with
it the process joins MPI as the rank. (PMIx, by which Open MPI does so, knows ranks by their
environment, not by their process; MPICH by a descriptor, which goes with it.) The stand-in lives
until the process ends. Both make sure that the other belongs to the same user.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable

from hvd_keras.launch.onhost.process import refuse_other_users

# The environment variable that holds a descriptor: MPICH's, through which a rank talks to mpirun.
_DESCRIPTOR = "PMI_FD"


def stand_in(address: str) -> str | None:
    """Stand in for a rank; returns the error of the other process, None if it has died."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    refuse_other_users(connection)
    message = json.dumps(dict(os.environ)).encode() + b"\n"
    descriptors = [int(os.environ[_DESCRIPTOR])] if _DESCRIPTOR in os.environ else []
    with connection, connection.makefile() as stream:
        socket.send_fds(connection, [message[:1]], descriptors)
        connection.sendall(message[1:])
        reply = stream.readline()
    return str(json.loads(reply)) if reply else None


class Joining:
    """The other process's end: listens for the stand-in at this address of a Unix socket."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._connection: socket.socket | None = None

    def join(self, seconds: float, takes: Callable[[str], bool]) -> socket.socket:
        """Take those variables of the stand-in's environment. Raises TimeoutError.

        The stand-in lives while the connection, which is returned, is open.
        """
        self._listener.settimeout(seconds)
        self._connection, _ = self._listener.accept()
        refuse_other_users(self._connection)
        message, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        with self._connection.makefile() as stream:
            environment = json.loads(message.decode() + stream.readline())
        if descriptors:
            environment[_DESCRIPTOR] = str(descriptors[0])
        os.environ.update({k: v for k, v in environment.items() if takes(k)})
        return self._connection

    def end(self, error: str) -> None:
        """Let the stand-in end: well, or with this error."""
        self._listener.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the stand-in has gone, with the job
                self._connection.sendall(json.dumps(error).encode() + b"\n")
                self._connection.close()
