"""Checks the user's command before anything starts, so that a typo gives one error, not N."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.options import EXAMPLE

# Options of the interpreter that have no value and come before a script.
_FLAGS = re.compile(r"-[bBdEiIOPqsSuvx]+")


def resolve(command: Sequence[str]) -> list[str]:
    """Return the command with the full path of its program. Raises UsageError.

    A Python file and "-m module" are run by the Python that runs hvdrun.
    """
    if command[0].endswith(".py") or command[0] == "-m":
        command = [sys.executable, *command]
    path = shutil.which(command[0])
    if path is None:
        raise UsageError(_why_not(command[0]))
    if path == sys.executable or re.fullmatch(r"python[\d.]*", Path(path).name):
        words = [word for word in command[1:] if not _FLAGS.fullmatch(word)]
        if words and not words[0].startswith("-"):
            _check_script(Path(words[0]), compiles=os.path.samefile(path, sys.executable))
    return [path, *command[1:]]


def _why_not(program: str) -> str:
    if not Path(program).is_file():
        return (
            f"got the command {program!r}, which is neither on PATH nor an executable file; "
            f"expected a program or a Python file, for example: {EXAMPLE}"
        )
    if "/" in program:
        return f"got the command {program!r}, which is not executable; see `chmod +x`"
    return f"got the command {program!r}, which is not on PATH; expected './{program}' for the file"


def _check_script(script: Path, compiles: bool) -> None:
    """`compiles` tells that the script is for the Python that runs us."""
    if not script.exists():
        raise UsageError(
            f"got the script {str(script)!r}, which does not exist in {Path.cwd()}; "
            "expected the path of a Python file"
        )
    if compiles and script.suffix == ".py" and script.is_file():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(script.read_bytes(), script, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError) as error:
            raise UsageError(f"cannot run {str(script)!r}: {error}") from error
