"""What ranks besides the first do to files in the working directory.

They wait for the first rank to make, move or remove them, and notice which of them they write;
what they would append is lost.
"""

import atexit
import builtins
import functools
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from hvd_keras.runtime import agree, log, rank_info

_SHOWN = 5

# For which a rank waits for the first one, and how often in vain: it may use other names.
_SECONDS, _TIMES = 5.0, 3


def watch() -> None:
    """Begin to notice them; what was written is told at the end of the script."""
    here = os.path.join(os.path.realpath(os.curdir), "")
    # Which may be in the working directory; code that is generated there is no one's result.
    temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "")
    found: dict[str, None] = {}
    in_vain = 0

    def wait_until(is_done: Callable[[Any], bool], path: Any) -> bool:
        nonlocal in_vain
        end = time.monotonic() + _SECONDS
        while not is_done(path) and in_vain < _TIMES:
            if time.monotonic() > end:
                in_vain += 1
                break
            time.sleep(0.01)
        return is_done(path)

    def is_result(path: Any) -> bool:
        path = os.path.realpath(path)
        own = f"{path}/".startswith(temporary) or "__pycache__" in path
        return path.startswith(here) and not own

    def after_first(change: Callable[..., Any], is_done: Callable[[Any], bool]) -> Any:
        @functools.wraps(change)
        def wait(path: Any, *args: Any, **kwargs: Any) -> Any:
            is_own = isinstance(path, int) or kwargs.get("dir_fd") is not None
            if is_own or agree.is_leading.get() or not is_result(path):
                return change(path, *args, **kwargs)
            # What is still there to be removed may be what the first rank has made since.
            if wait_until(is_done, path) or is_done is not os.path.isdir:
                return None
            return change(path, *args, **kwargs)

        return wait

    to_open = builtins.open

    @functools.wraps(to_open)
    def open_other(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(file, str | os.PathLike) and not {*"ax"}.isdisjoint(mode)
        if is_path and is_result(file):
            file = os.devnull if "a" in mode else file
            if wait_until(os.path.lexists, file):
                mode = mode.replace("x", "w")
        return to_open(file, mode, *args, **kwargs)

    builtins.open = io.open = open_other
    os.mkdir = after_first(os.mkdir, os.path.isdir)
    names = (os, ("remove", "unlink", "rmdir", "rename", "replace")), (shutil, ("rmtree", "move"))
    for home, functions in names:
        for name in functions:
            change = after_first(getattr(home, name), lambda path: not os.path.lexists(path))
            setattr(home, name, change)

    def notice(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str):
            return
        path, mode, flags = arguments
        writes = any(c in mode for c in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)
        if writes and is_result(path):
            # The first rank must not find a file that one process would not find.
            wait_until(os.path.lexists, path)
            found[os.path.realpath(path).removeprefix(here)] = None

    def tell() -> None:
        if found:
            names = ", ".join(list(found)[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
            log.logger.warning(
                "rank %s, too, has written %s: with --auto each rank runs the whole script. To "
                "write on the first rank alone: import hvd_keras as hvd, and if hvd.rank() == 0: "
                "...",
                *(rank_info.rank(), names),
            )

    sys.addaudithook(notice)
    atexit.register(tell)
