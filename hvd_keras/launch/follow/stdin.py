"""Passes hvdrun's standard input on to rank 0; Open MPI 5 would never tell it the input's end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path

from hvd_keras.launch.onhost.worker_local import stream_path

# Seconds between two tries to read a terminal that belongs to another job of the shell.
BACKGROUND_WAIT = 1.0


def make_pipe(directory: Path) -> tuple[int, int]:
    """Make the named pipe to rank 0; returns its ends for reading and writing.

    The reading end must stay open until rank 0 has ended: it keeps what was written before rank 0
    has opened the pipe.
    """
    path = stream_path(directory, 0, "in")
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return reader, os.open(path, os.O_WRONLY)


def pump(writer: int) -> None:
    """Copy standard input into `writer` from now on, in a thread that ends with the process."""
    # Ignored, it makes reading in the background fail instead of stopping us.
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    threading.Thread(target=_copy, args=(writer,), daemon=True).start()


def _copy(writer: int) -> None:
    # The pipe breaks when the job has ended.
    with contextlib.suppress(BrokenPipeError), open(writer, "wb", buffering=0) as pipe:
        while True:
            try:
                data = os.read(0, 1 << 16)
            except OSError as error:
                if error.errno == errno.EIO and os.isatty(0):
                    time.sleep(BACKGROUND_WAIT)
                    continue
                return  # nothing to read from, such as a folder
            if not data:
                return
            while data:
                data = data[pipe.write(data) :]
