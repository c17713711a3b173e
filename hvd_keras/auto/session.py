"""Starts ranks for a notebook or another session that hvdrun has not started, as the first rank.

hvdrun starts all ranks. The process of the first one stands in for the session, until that ends.
"""

import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from hvd_keras.agents.stand_in import Joining
from hvd_keras.launch.onhost.cores import THREAD_VARIABLES
from hvd_keras.runtime import libraries, settings

# What stays the session's own: its folder for temporary files outlives the job.
_OWN = (*THREAD_VARIABLES, "TMPDIR")


def start(np: int | None, hosts: str | None, *command: str) -> None:
    """Start ranks, and make this process the first one, which has not joined their job yet.

    Args:
        np: how many.
        hosts: where; this host is the first.
        command: what they run, with a path added to it; the first rank stands in there.

    Raises:
        ValueError: this process is in a job already.
        RuntimeError: hvdrun cannot start them.
    """
    if settings.launched()[0]:
        raise ValueError(
            f"hvd.auto: got np={np}, hosts={hosts!r} in a job of {settings.launched()[0]}, which "
            "has started the ranks. Leave both out."
        )
    with tempfile.TemporaryDirectory(prefix="hvd_keras-") as folder:
        path = str(Path(folder, "first"))
        joining = Joining(path)
        where = ["-H", hosts] if hosts else ["--oversubscribe"]
        where += ["-np", str(np)] if np else []
        hvdrun = [sys.executable, "-m", "hvd_keras.hvdrun", *where, "--no-bind", "--no-init"]
        # Ctrl-C is for the session alone.
        job = subprocess.Popen(
            [*hvdrun, *command, path], stdin=subprocess.DEVNULL, start_new_session=True
        )
        first = _join(joining, job)
    settings.read.cache_clear()
    # While the thread holds the connection open, the process of the first rank lives.
    threading.Thread(target=_watch, args=[first], daemon=True).start()


def _join(joining: Joining, job: "subprocess.Popen[bytes]") -> socket.socket:
    while True:
        try:
            return joining.join(0.1, lambda name: name not in _OWN)
        except TimeoutError:
            if job.poll() is not None:
                raise RuntimeError(
                    "hvd.auto: hvdrun could not start the ranks, and has printed why. The first "
                    "of the hosts must be this one."
                ) from None


def _watch(first: socket.socket) -> None:
    """When hvdrun ends the job, as a worker has died, let nothing wait for it."""
    first.recv(1)
    libraries.core().hvd_give_up(b"a worker of hvd.auto has ended, and hvdrun has printed why")
