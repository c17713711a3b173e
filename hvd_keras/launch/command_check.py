"""Checks the user's command before anything starts, so that a typo gives one error, not N."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_keras.launch.errors import UsageError


def resolve(command: Sequence[str]) -> list[str]:
    """Return the command with the full path of its program. Raises UsageError."""
    path = shutil.which(command[0])
    if path is None:
        raise UsageError(
            f"got the command {command[0]!r}, which is neither on PATH nor an executable file; "
            "expected a program, for example: hvdrun -np 2 python train.py"
        )
    if _is_python(path):
        script = _script(command[1:])
        if script is not None and not Path(script).exists():
            raise UsageError(
                f"got the script {script!r}, which does not exist in {Path.cwd()}; "
                "expected the path of a Python file"
            )
    return [path, *command[1:]]


def _is_python(path: str) -> bool:
    return path == sys.executable or bool(re.fullmatch(r"python[\d.]*", Path(path).name))


def _script(arguments: Sequence[str]) -> str | None:
    """Find the script among the interpreter's arguments; None for -c, -m and standard input."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return argument
        if argument == "-":
            return None
        if argument == "--check-hash-based-pycs":
            next(rest, None)
        elif not argument.startswith("--"):
            for position, letter in enumerate(argument[1:], start=2):
                if letter in "cm":
                    return None
                if letter in "WX":  # its value is the rest of this argument or the next one
                    if position == len(argument):
                        next(rest, None)
                    break
    return None
