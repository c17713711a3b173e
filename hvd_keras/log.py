"""Lines on stderr for people: Python's ``logging``, in the form of the core's."""

import functools
import logging

from hvd_keras import settings

logger = logging.getLogger("hvd_keras")


class _WithRank(logging.Formatter):
    def __init__(self, rank: int) -> None:
        super().__init__(f"%(name)s %(levelname)s rank {rank}: %(message)s")


def start(rank: int) -> None:
    """Shows lines from ``HVD_LOG_LEVEL`` on, with the rank, unless the script set a handler.

    Args:
        rank: of this process.
    """
    logger.setLevel(settings.read().log_level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_WithRank(rank))
        logger.addHandler(handler)
        logger.propagate = False


@functools.cache
def warn_once(text: str) -> None:
    """Writes a warning that this process has not written before."""
    logger.warning(text)
