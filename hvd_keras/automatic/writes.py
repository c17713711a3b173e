"""Notices files that ranks besides the first write into the working directory."""

import atexit
import os
import sys
import tempfile
from typing import Any

from hvd_keras.runtime import log, rank_info

_SHOWN = 5


def watch() -> None:
    """Begin to notice them; what was written is told at the end of the script."""
    here = os.path.join(os.path.realpath(os.curdir), "")
    # Which may be in the working directory; code that is generated there is no one's result.
    temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "")
    found: dict[str, None] = {}

    def notice(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str):
            return
        path, mode, flags = arguments
        if any(c in mode for c in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR):
            path = os.path.realpath(path)
            own = f"{path}/".startswith(temporary) or "__pycache__" in path
            if path.startswith(here) and not own:
                found[path.removeprefix(here)] = None

    def tell() -> None:
        if found:
            names = ", ".join(list(found)[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
            log.logger.warning(
                "rank %s, too, has written %s: with --auto each rank runs the whole script. Files "
                "that are appended to have the lines of all ranks. To write on the first rank "
                "alone: import hvd_keras as hvd, and if hvd.rank() == 0: ...",
                *(rank_info.rank(), names),
            )

    sys.addaudithook(notice)
    atexit.register(tell)
