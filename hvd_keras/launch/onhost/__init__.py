"""Code that runs on the hosts of a job, beside the ranks; it uses the standard library only."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

# The status with which ssh itself fails, and what is called as ssh is.
FAILED = 255


# Options of the interpreter that take the next word, and those that end them, as in ``-uc``.
_WITH_VALUE = re.compile(r"-[bBdEiIOPqsSuvx]*[WX]|--check-hash-based-pycs")
_LAST = re.compile(r"-[bBdEiIOPqsSuvx]*[cm]")


def is_python(path: str) -> bool:
    """Whether a program is a Python, by its name."""
    return path == sys.executable or bool(re.fullmatch(r"python[\d.]*", Path(path).name))


def divide_python(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the words behind a Python into its options, and the script, -, -m or -c on."""
    count = 0
    while count < len(words) and re.match("-.", words[count]) and not _LAST.match(words[count]):
        count += 2 if _WITH_VALUE.fullmatch(words[count]) else 1
    return [*words[:count]], [*words[count:]]


def program(module: str) -> list[str]:
    """Return the command that runs `main` of a module of hvd_keras (see `__main__.py`)."""
    return [sys.executable, "-I", "-S", str(Path(__file__).parent), module]
