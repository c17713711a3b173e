"""``python -m hvd_keras.horovod train.py ...``: a program for which ``horovod`` is hvd_keras."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_keras.horovod import horovodrun
from hvd_keras.launch.errors import UsageError

USAGE = """\
usage: python -m hvd_keras.horovod COMMAND ...

Runs a program written for Horovod; hvd_keras answers to its 'import horovod'. COMMAND is a Python
file, '-m module', '-c code', or the name of a program such as a console script, with arguments."""


def _execute(arguments: Sequence[str]) -> int:
    """Replace this process by the program; return an exit status if that is impossible."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 0 if arguments else 2
    name, own = arguments[0], str(Path(sys.executable).parent)
    program = shutil.which(name) or shutil.which(name, path=own)
    if program is None or name.startswith("-") or name.endswith(".py"):  # for the interpreter
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
    try:
        environment = {**os.environ, **horovodrun.settings(os.environ)}
    except UsageError as error:
        print(f"python -m hvd_keras.horovod: {error}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(_execute(sys.argv[1:]))
