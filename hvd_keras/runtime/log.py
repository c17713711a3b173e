"""Messages on stderr through Python's ``logging``, in the same format as the core's."""

import functools
import logging

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
    logger.error(text)


@functools.cache
def warn_once(text: str) -> None:
    """Write a warning, unless this process has already written it."""
    logger.warning(text)
