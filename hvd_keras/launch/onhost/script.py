"""Runs a script in this process, as a new Python does."""

import builtins
import functools
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

_HERE = Path(__file__).parent


def folder_of(words: Sequence[str]) -> str:
    """Return what Python puts first into ``sys.path`` for a script, or for ``-m`` and a module."""
    return os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))


def run(words: list[str]) -> None:
    """Run a script, or ``-m`` and a module, with its arguments as Python does."""
    sys.excepthook = functools.partial(_print_error, sys.excepthook)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], {"__builtins__": builtins}, "__main__", alter_sys=True)
        return
    sys.argv = words
    path = os.path.abspath(words[0])
    if pkgutil.get_importer(path) is not None:  # a folder or a zip file, with a __main__.py
        runpy.run_path(path, run_name="__main__")
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = loader = SourceFileLoader("__main__", path)
    vars(main).update(__builtins__=builtins, __cached__=None)
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)


def _print_error(
    hook: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Call this ``sys.excepthook`` with an error from where the script begins."""
    first = step = traceback
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename).parent == _HERE:
            first = step.tb_next
        step = step.tb_next
    hook(kind, error.with_traceback(first), first)
