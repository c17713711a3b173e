"""Forwards hvdrun's standard input to rank 0; Open MPI 5's mpirun never forwards end of file."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time

# Seconds between two tries to read a terminal that belongs to another job of the shell.
BACKGROUND_WAIT = 1.0


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
