"""Messages on stderr through Python's ``logging``, in the same format as the core's."""

import atexit
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable

from hvd_keras.runtime import settings

logger = logging.getLogger("hvd_keras")


def start(rank: int) -> None:
    """Show messages of ``HVD_LOG_LEVEL`` and above, with this process's rank."""
    # If the script has installed a handler, only the level is set.
    logger.setLevel(settings.read().log_level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        line = f"%(name)s %(levelname)s rank {rank}: %(message)s"
        handler.setFormatter(logging.Formatter(line))
        logger.addHandler(handler)
        logger.propagate = False


#: Whether the script, which has ended without an exception, must not have exit status 0.
has_failed = False


def fail_at_exit(text: str) -> None:
    """Write an error, and give this process exit status 1 when it ends."""
    global has_failed
    has_failed = True
    logger.disabled = False  # logging.config.dictConfig disables what it does not name
    logger.error(text)


@functools.cache
def warn_once(text: str) -> None:
    """Write a warning, unless this process has already written it."""
    logger.disabled = False
    logger.warning(text)


_POLL_SECONDS = 0.2


def tell_later(
    text: str,
    is_error: bool,
    is_needless: Callable[[], bool],
    is_due: Callable[[], bool],
    is_running: Callable[[], bool],
) -> None:
    """Warn when it is due, at the latest at the end, unless the script made it needless by then.

    An error is raised in the script's main thread, or ends the process with exit status 1.
    ``is_running``: whether the job goes on.
    """
    done = threading.Lock()

    def tell_now(goes_on: bool = False) -> None:
        if not done.acquire(blocking=False):  # the thread and the end of the script may meet here
            return
        atexit.unregister(tell_now)
        if is_needless():
            return
        if not is_error:
            warn_once(text)
        elif goes_on:
            _raise_in_main_thread(f"hvd_keras: {text}")
        else:
            fail_at_exit(text)

    def wait() -> None:
        # In a graph later steps run no Python code, so a thread asks.
        while is_running() and not is_due() and not done.locked():
            time.sleep(_POLL_SECONDS)
        tell_now(goes_on=is_running())

    atexit.register(tell_now)
    threading.Thread(target=wait, daemon=True, name="hvd_keras advice").start()


def _raise_in_main_thread(text: str) -> None:
    # Python makes the error from its class, without an argument.
    members = {"__str__": lambda _: text, "__module__": "builtins"}
    error = type("ValueError", (ValueError,), members)
    thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))
