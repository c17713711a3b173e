"""What hvdrun knows of automatic mode."""

import argparse
import re
from collections.abc import Mapping, Sequence

from hvd_keras.launch import command_check
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost import divide_python, is_python
from hvd_keras.launch.options import Extension

SCALE_BATCH = "--scale-batch"
#: To the module that runs the script: it is of a session that has started the ranks.
SESSION = "--session"

_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def _add_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scripts without hvd_keras")
    for name, text in (
        ("--auto", "divide the batches of a script of one process, with its results"),
        (SCALE_BATCH, "with --auto: larger batches and rate, with other results"),
    ):
        group.add_argument(name, action="store_true", help=f"{text} (default: off)")


def _complete(given: argparse.Namespace, environment: Mapping[str, str]) -> None:
    if not given.auto:
        if given.scale_batch:
            raise UsageError(f"got {SCALE_BATCH} without --auto; expected both")
        return
    if given.horovod:
        raise UsageError("got --auto and --horovod; expected one of them")
    # The first rank may compute whole steps, as fast as one process.
    given.bind = False
    alone = {name: "0" for name in _THREADS if name not in environment}  # TensorFlow: all cores
    given.settings = alone | given.settings
    if given.command:
        given.command = _inside(command_check.resolve(given.command), given.scale_batch)


EXTENSION = Extension({}, _add_to, _complete)


def _inside(command: Sequence[str], scale_batch: bool) -> list[str]:
    """Return the command of a Python script with the module that runs it, behind Python's flags."""
    options, words = divide_python(command[1:])
    if not is_python(command[0]) or not words or re.match("-(?!m$)", words[0]):
        raise UsageError(
            f"--auto got the command {' '.join(command)!r}; expected a Python script or -m module"
        )
    module = ["-m", "hvd_keras.auto", *[SCALE_BATCH] * scale_batch]
    return [command[0], *options, *module, *words]
