"""Finds files that callbacks of the script write on several ranks, one over the other."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

from hvd_keras.gradients import missing_calls
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import is_of_keras, keras
from hvd_keras.runtime.process_sets import ProcessSet

_WRITES = os.O_WRONLY | os.O_RDWR
_LIST = "callbacks.callback_list"  # the module of Keras that calls callbacks

_written: dict[str, str] | None = None  # while fit runs: what writes each path


@contextlib.contextmanager
def noted(process_set: ProcessSet) -> Iterator[None]:
    """Tell, at the end of a ``fit``, of files that several ranks of a host have written."""
    global _written
    _listen()
    before, _written = _written, {}
    try:
        yield
        # Not devices, such as /dev/null. What is renamed or removed already was a file.
        files = {os.path.realpath(path): what for path, what in _written.items()}
        mine = {p: what for p, what in files.items() if os.path.isfile(p) or not os.path.exists(p)}
        host = os.uname().nodename
        gathered = agree.gather_json("files of callbacks", [host, mine], process_set)
    finally:
        _written = before
    seen: set[tuple[str, str]] = set()
    for host, paths in gathered:
        for path, what in paths.items():
            if (host, path) in seen:
                missing_calls.tell(
                    f"{what} writes {path} on several ranks. Write it on one, in an `if hvd.rank() "
                    "== 0:`, or give each rank its own file.",
                    process_set,
                )
                return
            seen.add((host, path))


@functools.cache
def _listen() -> None:
    sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _written is None or event != "open":
        return
    path, _, flags = arguments
    if not isinstance(path, str) or not isinstance(flags, int) or not flags & _WRITES:
        return
    what, frame = "a callback", sys._getframe(1)
    while frame is not None:  # the callback that writes is called by Keras's list
        owner = frame.f_locals.get("self")
        if str(frame.f_globals.get("__name__")).endswith(_LIST):
            _written[path] = what
            return
        if isinstance(owner, keras.callbacks.Callback):
            if is_of_keras(type(owner)) or type(owner).__module__.startswith("hvd_keras."):
                return
            what = f"the callback {type(owner).__name__}"
        frame = frame.f_back  # type: ignore[assignment]
