"""What ranks besides the first do to files in the working directory, in which the first's remain.

They wait for the first rank to make, move or remove them. What they write themselves goes into
files of their own, which they read in place of those.
"""

import builtins
import collections
import contextlib
import functools
import io
import os
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any

import h5py  # type: ignore[import-untyped]
import tensorflow as tf
from numpy.lib import _datasource

from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import replace

# What opens files: its path and mode, by its arguments.
_OPEN: list[tuple[Any, str, Callable[..., tuple[Any, str]]]] = [
    (builtins, "open", lambda file, mode="r", *_, **__: (file, mode)),
    (h5py.File, "__init__", lambda self, name, mode="r", *_, **__: (name, mode)),
    (tf.io.gfile.GFile, "__init__", lambda self, name, mode="r": (name, mode)),
    (tf.io.TFRecordWriter, "__init__", lambda self, path, *_, **__: (path, "w")),
    (tf.io, "read_file", lambda filename, *_, **__: (filename, "r")),
    (tf.io, "write_file", lambda filename, *_, **__: (filename, "w")),
    (tf.summary, "create_file_writer", lambda logdir, *_, **__: (logdir, "w")),
    (sqlite3, "connect", lambda database, *_, **__: (database, "a")),
]


def divert() -> None:
    """Begin to do so."""
    here = os.path.join(os.path.realpath(os.curdir), "")
    # Which may be in the working directory; code that is generated there is no one's result.
    temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "")
    folder = tempfile.TemporaryDirectory(prefix="hvd_keras-")
    begun = time.time()
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
        if not result(path) or not wait_until(lambda: os.path.lexists(path), "make"):
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

    def open_own(find: Callable[..., Any], of_library: Any, *args: Any, **kwargs: Any) -> Any:
        path, mode = find(*args, **kwargs)
        is_other = "opener" in kwargs or str(path).startswith((":", "file:"))  # of SQLite
        name, writes = "" if is_other else result(path), not {*"wxa+"}.isdisjoint(mode)
        if not name or (name not in own and not writes):
            return of_library(*args, **kwargs)
        if name not in own:
            new = os.path.join(folder.name, str(time.monotonic_ns()))
            with contextlib.suppress(FileNotFoundError):  # the first rank may be moving it
                # To what is newer than the script's start, it has begun to append.
                if "r" in mode or ("a" in mode and os.path.getmtime(name) < begun):
                    shutil.copyfile(name, new)
            own[name] = new
        place = next((i for i, one in enumerate(args) if one is path), -1)  # a mode may be, too
        args = tuple(own[name] if i == place else one for i, one in enumerate(args))
        kwargs = {key: own[name] if one is path else one for key, one in kwargs.items()}
        made = of_library(*args, **kwargs)
        opened: Any = next((one for one in (made, *args) if one is not None), None)  # or self
        if writes and hasattr(opened, "__dict__") and not os.path.isdir(own[name]):
            opened.close = functools.partial(close, weakref.ref(opened), name)
        elif writes:  # it is closed, or a database, or a folder
            close(lambda: None, name)
        return made

    def close(opened: Callable[[], Any], name: str) -> None:
        if (file := opened()) is not None:  # not yet closed, as it is in open(...).close()
            type(file).close(file)
        size = size_of(own.get(name, ""))  # other code may read the first rank's file
        wait_until(lambda: size_of(name) >= size, "write")

    def size_of(path: str) -> int:
        with contextlib.suppress(FileNotFoundError):  # the first rank may be moving it
            return 0 if os.path.isdir(path) else os.path.getsize(path)
        return -1

    for owner, attribute, find in _OPEN:
        replace(owner, attribute, functools.partial(open_own, find))
    replace(tf.io.TFRecordWriter, "__exit__", lambda of_base, writer, *error: writer.close())
    replace(os.path, "exists", lambda of, path: result(path) in own or of(path))
    io.open = vars(_datasource)["_file_openers"]._file_openers[None] = builtins.open
    replace(os, "symlink", lambda link, to, at, **kw: make(lambda _: link(to, at, **kw), at))
    for home, new, names in (
        (os, make, ("mkdir",)),
        (os, change, ("remove", "unlink", "rmdir", "rename", "replace")),
        (shutil, change, ("rmtree", "move")),
        (tf.io.gfile, make, ("mkdir", "makedirs")),
        (tf.io.gfile, change, ("remove", "rmtree", "rename")),
    ):
        for name in names:
            replace(home, name, new)
