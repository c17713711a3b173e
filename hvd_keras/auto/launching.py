"""What hvdrun knows of automatic mode."""

import argparse
import re
from collections.abc import Mapping, Sequence

from hvd_keras.launch import command_check
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost import cores, divide_python
from hvd_keras.launch.options import Extension

SCALE_BATCH = "--scale-batch"
#: To the module that runs the script: the user has not set its threads, which may use all cores.
ALL_CORES = "--all-cores"
#: To that module: it is of a session that has started the ranks.
SESSION = "--session"


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
    given.bind = False
    flags = [SCALE_BATCH] * given.scale_batch
    flags += [ALL_CORES] * environment.keys().isdisjoint(cores.THREAD_VARIABLES)
    if given.command:
        given.command = _inside(command_check.resolve(given.command), flags)


EXTENSION = Extension({}, _add_to, _complete)


def _inside(command: Sequence[str], flags: list[str]) -> list[str]:
    """Return the command of a Python script with the module that runs it, behind Python's flags."""
    options, words = divide_python(command[1:])
    if not command_check.is_python(command[0]) or not words or re.match("-(?!m$)", words[0]):
        raise UsageError(
            f"--auto got the command {' '.join(command)!r}; expected a Python script or -m module"
        )
    return [command[0], *options, "-m", "hvd_keras.auto", *flags, *words]
