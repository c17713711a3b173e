"""Forwards hvdrun's standard input to rank 0; Open MPI 5's mpirun never forwards end of file."""

import asyncio
import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any

from hvd_keras.launch.onhost.channel import PIECE
from hvd_keras.launch.onhost.limits import BACKGROUND_WAIT


def forward(send: Callable[[bytes], Coroutine[Any, Any, bool]]) -> None:
    """Pass standard input to `send`, and an empty piece at its end, until `send` returns False."""
    # If ignored, a read in the background fails instead of stopping hvdrun.
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    loop = asyncio.get_running_loop()

    def pump() -> None:
        # When the job has ended, the loop ends and cancels the call.
        with contextlib.suppress(RuntimeError, CancelledError):
            while not loop.is_closed():
                data = _read()
                if not asyncio.run_coroutine_threadsafe(send(data), loop).result():
                    return

    threading.Thread(target=pump, daemon=True).start()


def _read() -> bytes:
    while True:
        try:
            return os.read(0, PIECE)
        except OSError as error:
            if error.errno != errno.EIO or not os.isatty(0):
                return b""  # nothing to read from, such as a folder
            time.sleep(BACKGROUND_WAIT)
