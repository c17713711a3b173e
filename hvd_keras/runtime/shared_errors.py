"""An uncaught error that several ranks of a host have is printed by the first of them alone."""

import hashlib
import sys
import traceback
from types import TracebackType
from typing import Any

from hvd_keras.runtime import settings

_previous: Any = None


def install() -> None:
    """Wrap ``sys.excepthook``, if hvdrun follows this process and is not to show all."""
    global _previous
    if _previous is None and settings.hvdrun_folder() is not None:
        _previous, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    try:
        other = _other_rank(kind, value, trace)
    except Exception:  # its own __str__ fails, or the disk is full
        other = ""
    if other:
        text = f"{kind.__name__}, as on rank {other} (hvdrun --verbose: where)"
        print(text, file=sys.stderr)
    else:
        _previous(kind, value, trace)


def _other_rank(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> str:
    """Return the rank of this host that prints this error, if it is another one."""
    folder, mine = settings.hvdrun_folder(), str(settings.launched_rank())
    if folder is None:
        return ""
    lines = "".join(traceback.format_exception(kind, value, trace))
    error = settings.ERROR + hashlib.sha256(lines.encode()).hexdigest()[:16]
    try:
        (folder / error).symlink_to(mine)
        first = mine
    except FileExistsError:
        first = str((folder / error).readlink())
    settings.tell_hvdrun(mark=error if first == mine else settings.REPEATED + error)
    return first if first != mine else ""
