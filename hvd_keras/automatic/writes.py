"""What ranks besides the first do to files in the working directory, in which the first's remain.

They wait for the first rank to make, move or remove them. What they write themselves goes into
files of their own, which they read in place of those.
"""

import atexit
import builtins
import collections
import functools
import io
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any

from numpy.lib import _datasource

from hvd_keras.automatic import replace
from hvd_keras.runtime import agree, log, rank_info


def divert() -> None:
    """Begin to do so; files that the first rank has not written get their names at the end."""
    here = os.path.join(os.path.realpath(os.curdir), "")
    # Which may be in the working directory; code that is generated there is no one's result.
    temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "")
    folder = tempfile.TemporaryDirectory(prefix="hvd_keras-")
    own: dict[str, str] = {}  # this rank's files, by their names in the working directory
    in_vain: collections.Counter[str] = collections.Counter()

    def wait_until(is_done: Callable[[], bool], what: str) -> bool:
        # Seconds; not as long after three times in vain, as the first rank may use other names.
        end = time.monotonic() + (5.0 if in_vain[what] < 3 else 0.3)
        while not (done := is_done()) and time.monotonic() < end:
            time.sleep(0.01)
        in_vain[what] += not done
        return done

    def result(path: Any) -> str:
        """The full name of a file in the working directory; "" of others."""
        if agree.is_leading.get() or not isinstance(path, str | os.PathLike):
            return ""
        path = os.path.realpath(os.fsdecode(path))
        is_other = f"{path}/".startswith(temporary) or "__pycache__" in path
        return path if path.startswith(here) and not is_other else ""

    def make(mkdir: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        if not result(path) or not wait_until(lambda: os.path.isdir(path), "make"):
            mkdir(path, *args, **kwargs)

    def change(of_python: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        name = "" if "dir_fd" in kwargs else result(path)
        if not name:
            return of_python(path, *args, **kwargs)
        # What is still there may be what the first rank has made since.
        wait_until(lambda: not os.path.lexists(path), "change")
        for one in [one for one in own if f"{one}/".startswith(f"{name}/")]:
            file = own.pop(one)
            if args and isinstance(args[0], str | os.PathLike):  # it is moved
                own[os.path.realpath(args[0]) + one.removeprefix(name)] = file
        return None

    def open_own(of_python: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        name = "" if "opener" in kwargs else result(file)
        if not name or (name not in own and {*"wxa+"}.isdisjoint(mode)):
            return of_python(file, mode, *args, **kwargs)
        if "a" in mode and name not in own:
            return of_python(os.devnull, mode, *args, **kwargs)
        if name not in own:
            new = os.path.join(folder.name, str(len(os.listdir(folder.name))))
            if "r" in mode:
                shutil.copyfile(name, new)
            own[name] = new
        opened = of_python(own[name], mode, *args, **kwargs)
        opened.close = functools.partial(close, weakref.ref(opened), name)
        return opened

    def close(opened: Any, name: str) -> None:
        if (file := opened()) is not None:  # not yet closed, as it is in open(...).close()
            type(file).close(file)
        if name in own:  # other code than Python's may read the first rank's file
            size = os.path.getsize(own[name])
            wait_until(lambda: os.path.exists(name) and os.path.getsize(name) >= size, "write")

    def end() -> None:
        found = [n for n in own if not os.path.exists(n) and os.path.isdir(os.path.dirname(n))]
        with agree.within(agree.is_leading, True):
            for name in found:
                shutil.copyfile(own[name], name)
        if found:
            text = ", ".join(name.removeprefix(here) for name in found[:5])
            log.logger.warning("rank %s, too, has written %s", rank_info.rank(), text)

    def exists(of_numpy: Callable[..., bool], source: Any, path: Any) -> bool:
        return result(path) in own or of_numpy(source, path)

    replace(builtins, "open", open_own)
    replace(_datasource.DataSource, "exists", exists)
    io.open = vars(_datasource)["_file_openers"]._file_openers[None] = builtins.open
    replace(os, "mkdir", make)
    for name in ("remove", "unlink", "rmdir", "rename", "replace"):
        replace(os, name, change)
    for name in ("rmtree", "move"):
        replace(shutil, name, change)
    atexit.register(end)
