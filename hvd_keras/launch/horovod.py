"""Runs a command for which ``import horovod`` finds hvd_keras, by its PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import hvd_keras.horovod
from hvd_keras.launch import horovodrun

USAGE = """\
usage: python -m hvd_keras.horovod COMMAND ...

Runs a program written for Horovod; hvd_keras answers to its 'import horovod'. COMMAND is a Python
file, '-m module', '-c code', or the name of a program such as a console script, with arguments."""


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What an environment needs besides: ``import horovod`` finds hvd_keras; Horovod's settings."""
    others = environment.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [hvd_keras.horovod.PATH, others]))
    return {"PYTHONPATH": path, **horovodrun.translated(environment)}


def execute(arguments: Sequence[str]) -> int:
    """Replace this process by the program; return an exit status if there is none."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 0 if arguments else 2
    program = _program(arguments[0])
    if program is None:
        if sys.flags.ignore_environment:
            print(
                "python -m hvd_keras.horovod: Python ignores PYTHONPATH because of -E or -I. Leave "
                "that option out, or call hvd_keras.horovod.install() in the script.",
                file=sys.stderr,
            )
            return 2
        # The interpreter's own options are those before "-m hvd_keras.horovod".
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) - 1]
        command = [sys.executable, *options, *arguments]
    else:
        command = [program, *arguments[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **settings(os.environ)})


def _program(name: str) -> str | None:
    """The path of a program; None for Python files and options, which the interpreter takes."""
    if name.startswith("-") or name.endswith(".py"):
        return None
    own = str(Path(sys.executable).parent)
    return shutil.which(name) or shutil.which(name, path=own)
