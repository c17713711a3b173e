"""What hvdrun knows of automatic mode."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_keras.launch import command_check
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.options import Extension

SCALE_BATCH = "--scale-batch"


def extended(other: Extension) -> Extension:
    """Add the option ``--auto`` to those of another extension."""

    def add_to(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("scripts without hvd_keras")
        for name, text in (
            ("--auto", "divide the batches of a script of one process, with its results"),
            (SCALE_BATCH, "with --auto: larger batches and rate, with other results"),
        ):
            group.add_argument(name, action="store_true", help=f"{text} (default: off)")
        other.add_to(parser)

    def complete(given: argparse.Namespace, environment: Mapping[str, str]) -> None:
        other.complete(given, environment)
        if not given.auto:
            if given.scale_batch:
                raise UsageError(f"got {SCALE_BATCH} without --auto; expected both")
            return
        if getattr(given, "horovod", False):
            raise UsageError("got --auto and --horovod; expected one of them")
        if given.command:
            given.command = _inside(command_check.resolve(given.command), given.scale_batch)
        given.uses_hvd_keras = True
        # Sets of texts have the same order on all ranks.
        given.settings = {"PYTHONHASHSEED": environment.get("PYTHONHASHSEED", "0")} | given.settings

    return Extension(other.aliases, add_to, complete)


def _inside(command: Sequence[str], scale_batch: bool) -> list[str]:
    """Return the command of a Python script with the module that runs it, behind Python's flags."""
    python, *words = command
    place = command_check.options_before(words)
    is_python = re.fullmatch(r"python[\d.]*", Path(python).name)
    if not is_python or place == len(words) or re.match("-(?!m$)", words[place]):
        raise UsageError(
            f"--auto got the command {' '.join(command)!r}; expected a Python script or -m module"
        )
    module = ["-m", "hvd_keras.automatic", *[SCALE_BATCH] * scale_batch]
    return [python, *words[:place], *module, *words[place:]]
