"""Checks the user's command before anything starts, so that a typo gives one error, not N."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import hvd_keras
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost import divide_python, is_python
from hvd_keras.launch.options import EXAMPLE

# A script that cannot do without hvd_keras.
_IMPORT = re.compile(rb"^(import|from) +hvd_keras\b", re.MULTILINE)


def resolve(command: Sequence[str]) -> list[str]:
    """Return the command with its program's full path, or our Python's. Raises UsageError."""
    if command[0].endswith(".py") or command[0] == "-m":
        command = [sys.executable, *command]
    path = shutil.which(command[0])
    if path is None:
        raise UsageError(_why_not(command[0]))
    if is_python(path):
        _, words = divide_python(command[1:])
        if words and not words[0].startswith("-"):
            _check_script(Path(words[0]), path)
        elif words[:2] == ["-m", "hvd_keras.check"]:
            _check_packages(path)
    return [path, *command[1:]]


def _why_not(program: str) -> str:
    if program.endswith(".ipynb"):
        return (
            f"got the notebook {program!r}, expected a program: call hvd_keras.run(function, np=2) "
            "in the notebook (docs/notebooks/training.md), or make a script of it: "
            f"jupyter nbconvert --to script {program}"
        )
    if not Path(program).is_file():
        return (
            f"got the command {program!r}, which is neither on PATH nor an executable file; "
            f"expected a program or a Python file, for example: {EXAMPLE}"
        )
    if "/" in program:
        return f"got the command {program!r}, which is not executable; see `chmod +x`"
    return f"got the command {program!r}, which is not on PATH; expected './{program}' for the file"


def _check_script(script: Path, python: str) -> None:
    if not script.exists():
        raise UsageError(
            f"got the script {str(script)!r}, which does not exist in {Path.cwd()}; "
            "expected the path of a Python file"
        )
    if script.suffix != ".py" or not script.is_file():
        return
    try:
        source = script.read_bytes()
        if os.path.samefile(python, sys.executable):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(source, script, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"cannot run {str(script)!r}: {error}") from error
    if _IMPORT.search(source):
        _check_packages(python)


def _check_packages(python: str) -> None:
    """Raise UsageError if this Python lacks what every rank needs; otherwise each rank would."""
    names = ("hvd_keras", "tensorflow", "torch")
    same = os.path.samefile(python, sys.executable)
    if same and Path(python).parent.samefile(Path(sys.executable).parent):  # saves a start
        missing = [name for name in names if importlib.util.find_spec(name) is None]
    else:
        look = "import importlib.util as u; print(*(n for n in %r if u.find_spec(n) is None))"
        command = [python, "-c", look % (names,)]
        # Not from here, where hvd_keras may be a folder of sources.
        missing = subprocess.run(command, cwd="/", capture_output=True, text=True).stdout.split()
    if "hvd_keras" in missing:
        raise UsageError(
            f"got the Python {python}, which has no hvd_keras; hvdrun belongs to\n"
            f"{sys.executable}. Omit the Python, as in {EXAMPLE}, or install hvd_keras there"
        )
    if {"tensorflow", "torch"} <= set(missing):  # with PyTorch alone, the script may choose that
        raise UsageError(hvd_keras.no_tensorflow(python))
