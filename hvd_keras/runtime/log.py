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


@functools.cache
def warn_once(text: str) -> None:
    """Write a warning, unless this process has already written it."""
    logger.warning(text)
