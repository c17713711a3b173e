"""An uncaught error that several ranks of a host have is printed by the first of them alone."""

import contextlib
import hashlib
import pathlib
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from hvd_keras.runtime import settings

_previous: Any = None

# Seconds for which a rank waits until the first one has printed the error.
_WAIT = 2.0


def install() -> None:
    """Wrap ``sys.excepthook``, if hvdrun follows this process and is not to show all."""
    global _previous
    if _previous is None and settings.hvdrun_folder() is not None:
        _previous, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    first, printed = "", None
    folder, mine = settings.hvdrun_folder(), str(settings.launched_rank())
    try:
        if folder is not None:
            lines = "".join(traceback.format_exception(kind, value, trace))
            error = settings.ERROR + hashlib.sha256(ascii(lines).encode()).hexdigest()[:16]
            first, printed = _first_rank(folder / error, mine), folder / f"{error}-printed"
            settings.tell_hvdrun(mark=error if first == mine else settings.REPEATED + error)
    except Exception:  # its own __str__ fails, or the disk is full
        printed = None
    if printed is not None and first != mine and _waited_for(printed):
        text = f"{kind.__name__}, as on rank {first} (hvdrun --verbose: where)"
        print(text, file=sys.stderr)
        return
    _previous(kind, value, trace)
    if printed is not None:
        with contextlib.suppress(OSError, ValueError):  # a full disk; nobody reads it
            sys.stderr.flush()
            printed.touch()


def _first_rank(path: pathlib.Path, mine: str) -> str:
    """Return the rank of this host that has the error of this path first."""
    try:
        path.symlink_to(mine)
    except FileExistsError:
        return str(path.readlink())
    return mine


def _waited_for(path: pathlib.Path) -> bool:
    limit = time.monotonic() + _WAIT
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    return path.exists()
