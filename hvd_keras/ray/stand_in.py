"""A rank that is another process: Ray Train's workers exist before mpirun starts ranks.

mpirun starts a stand-in for each rank, which hands its environment to the worker of that rank on
its host; with it the worker joins MPI as that rank. (PMIx, by which Open MPI does so, knows ranks
by their environment, not by their process.) The stand-in lives until the worker ends, and ends as
it does. They meet at an abstract Unix socket and make sure that the other belongs to the same user.
"""

import contextlib
import json
import os
import signal
import socket

from hvd_keras.launch.onhost.process import refuse_other_users
from hvd_keras.launch.onhost.worker import CALL, find_rank

# What a worker needs of its stand-in's environment.
PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "HVD_", "HVDRUN_")


def _address(name: str, rank: int) -> str:
    return f"\0hvd-ray-{name}-{rank}"


def stand_in(name: str) -> None:
    """Stand in for a rank, by ``run_function``. Raises RuntimeError with its traceback."""
    rank = find_rank(os.environ)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_address(name, rank))
    refuse_other_users(connection)
    given = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES) and k != CALL}
    with connection, connection.makefile("rw") as stream:
        print(json.dumps(given), file=stream, flush=True)
        reply = stream.readline()
    if not reply:
        os.kill(os.getpid(), signal.SIGKILL)  # as the worker
    if error := json.loads(reply)["error"]:
        raise RuntimeError(f"the worker of rank {rank} failed:\n{error}")


class Joining:
    """The worker's end: listens for the stand-in of its rank."""

    def __init__(self, name: str, rank: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(name, rank))
        self._listener.listen()
        self._connection: socket.socket | None = None

    def join(self, seconds: float) -> None:
        """Take the stand-in's environment. Raises TimeoutError."""
        self._listener.settimeout(seconds)
        self._connection, _ = self._listener.accept()
        refuse_other_users(self._connection)
        with self._connection.makefile() as stream:
            os.environ.update(json.loads(stream.readline()))

    def end(self, error: str) -> None:
        """Let the stand-in end: well, or with this error."""
        self._listener.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the stand-in has gone, with the job
                self._connection.sendall(json.dumps({"error": error}).encode() + b"\n")
                self._connection.close()
