"""Options of horovodrun, understood by hvdrun: renamed, turned into a setting, ignored or refused.

Those that hvdrun has under the same name and meaning are in `options`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_keras.launch.errors import UsageError


@dataclass(frozen=True)
class Option:
    """An option of horovodrun.

    Attributes:
        flags: its names.
        values: how many words follow it.
        option: the option of hvdrun that it stands for.
        setting: the environment variable that it stands for, and the value made of its own.
        note: what is said about one that has no counterpart.
        refused: whether it is an error; the note says what to do.
    """

    flags: Sequence[str]
    values: int = 1
    option: str = ""
    setting: tuple[str, Callable[[str], str]] | None = None
    note: str = ""
    refused: bool = False


def _bytes_of_megabytes(text: str) -> str:
    if not text.isdecimal():
        raise UsageError(f"--fusion-threshold-mb got {text!r}; expected a whole number of MiB")
    return str(max(1, int(text) << 20))


def _log_level(text: str) -> str:
    level = {"TRACE": "DEBUG", "FATAL": "ERROR"}.get(text.upper(), text.upper())
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise UsageError(f"the log level is {text!r}; expected debug, info, warning or error")
    return level


_ONE_SIZE = "not needed: one bucket size is close to the best everywhere"
_HIERARCHY = "not needed: sums over several hosts are hierarchical; HVD_ALLREDUCE selects how"
_CYCLES = "not needed: there are no cycles and no cache"
_MPI = "not needed: ranks use MPI and shared memory"
_TIMES = "not supported: lines are prefixed with the rank, without a timestamp"

OPTIONS = (
    Option(("-v",), 0, option="--version"),
    Option(("-hostfile",), option="--hostfile"),
    Option(("-p",), option="--ssh-port"),
    Option(("-i",), option="--ssh-identity-file"),
    Option(("-cb", "--check-build"), 0, option="--check"),
    Option(("--min-num-proc",), option="--min-np"),
    Option(("--network-interfaces",), option="--network-interface"),
    Option(("--output-filename",), option="--output-dir"),
    Option(("--timeline-filename",), option="--timeline"),
    Option(("--reset-limit",), option="--max-restarts"),
    Option(("--elastic-timeout",), option="--restart-timeout"),
    Option(("--fusion-threshold-mb",), setting=("HVD_BUCKET_BYTES", _bytes_of_megabytes)),
    Option(("--log-level",), setting=("HVD_LOG_LEVEL", _log_level)),
    Option(
        ("--stall-check-warning-time-seconds",),
        setting=("HVD_STALL_WARNING_SECONDS", lambda text: text),
    ),
    Option(
        ("--stall-check-shutdown-time-seconds",),
        setting=("HVD_TIMEOUT_SECONDS", lambda text: text),
    ),
    Option(
        ("--no-stall-check",), 0, setting=("HVD_STALL_WARNING_SECONDS", lambda text: text or "0")
    ),
    Option(("--stall-check",), 0, note="not needed: always on"),
    Option(("--disable-cache",), 0, note=_CYCLES),
    Option(("--cycle-time-ms", "--cache-capacity"), note=_CYCLES),
    Option(("--timeline-mark-cycles", "--no-timeline-mark-cycles"), 0, note=_CYCLES),
    Option(("--hierarchical-allreduce", "--no-hierarchical-allreduce"), 0, note=_HIERARCHY),
    Option(("--hierarchical-allgather", "--no-hierarchical-allgather"), 0, note=_HIERARCHY),
    Option(("--torus-allreduce", "--no-torus-allreduce"), 0, note=_HIERARCHY),
    Option(("--autotune", "--no-autotune"), 0, note=_ONE_SIZE),
    Option(
        (
            "--autotune-log-file",
            "--autotune-warmup-samples",
            "--autotune-steps-per-sample",
            "--autotune-bayes-opt-max-samples",
            "--autotune-gaussian-process-noise",
        ),
        note=_ONE_SIZE,
    ),
    Option(("--gloo", "--mpi"), 0, note=_MPI),
    Option(("--tcp", "--mpi-threads-disable", "--no-mpi-threads-disable"), 0, note=_MPI),
    Option(("--gloo-timeout-seconds", "--thread-affinity", "--num-nccl-streams"), note=_MPI),
    Option(("-prefix-timestamp", "--prefix-output-with-timestamp"), 0, note=_TIMES),
    Option(("--log-with-timestamp", "--log-without-timestamp"), 0, note=_TIMES),
    Option(("--log-hide-timestamp", "--no-log-hide-timestamp"), 0, note=_TIMES),
    Option(
        ("--max-np", "--max-num-proc"),
        note="not needed: a restart uses at most -np ranks; see also --max-restarts",
    ),
    Option(("--blacklist-cooldown-range",), 2, note="not needed: a restart checks all hosts"),
    Option(
        ("--slots-per-host",),
        refused=True,
        note="write the slots after each host: -H server1:4, or 'server1:4' in the hostfile or in "
        "the output of the discovery script",
    ),
    Option(("--jsrun",), 0, refused=True, note="start the script with jsrun, not hvdrun"),
    Option(("--binding-args",), refused=True, note="use --mpi-args"),
    Option(("--config-file",), refused=True, note="give the options on the command line"),
)


class _Action(argparse.Action):
    """What an option of horovodrun does."""

    def __init__(self, horovod: Option, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.horovod = horovod

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """From argparse."""
        horovod = self.horovod
        if horovod.refused:
            raise UsageError(f"{option_string} is an option of horovodrun; {horovod.note}")
        value = values[0] if values else ""
        if horovod.option:
            if horovod.option == "--network-interface" and "," in value:
                raise UsageError(f"{option_string} got {value!r}; expected one interface")
            if str(option_string).startswith("--"):
                _say(f"{option_string} is {horovod.option} here")
            action = parser._option_string_actions[horovod.option]
            if isinstance(action, argparse._StoreTrueAction | argparse._VersionAction):
                value = []
            else:
                value = parser._get_value(action, value)
            action(parser, namespace, value, horovod.option)
        elif horovod.setting is not None:
            name, convert = horovod.setting
            namespace.settings[name] = convert(value)
            _say(f"{option_string} is {name}={namespace.settings[name]} here")
        else:
            _say(f"{option_string} has no effect; {horovod.note}")


# Horovod's settings that have a counterpart.
SETTINGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("HVD_BUCKET_BYTES", lambda text: text if text != "0" else "1"),
    "HOROVOD_LOG_LEVEL": ("HVD_LOG_LEVEL", _log_level),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("HVD_STALL_WARNING_SECONDS", lambda text: text),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("HVD_TIMEOUT_SECONDS", lambda text: text),
    "HOROVOD_TIMELINE": ("HVD_TIMELINE", lambda text: text),
}

# For an elastic job, in which horovodrun replaces ranks as often as needed.
_ELASTIC_RESTARTS = 10


def translated(environment: Mapping[str, str]) -> dict[str, str]:
    """Return hvd_keras's settings for those of Horovod, unless it has its own."""
    found = {}
    for theirs, (ours, convert) in SETTINGS.items():
        if environment.get(theirs) and not environment.get(ours):
            found[ours] = convert(environment[theirs])
            _say_once(f"{theirs} is {ours}={found[ours]} here")
    return found


def restarts(given: argparse.Namespace) -> int:
    """Return how often a job restarts whose command line does not say it."""
    is_elastic = given.min_np is not None or given.host_discovery_script is not None
    if not given.horovod or not is_elastic:
        return 0
    _say(f"an elastic job restarts up to {_ELASTIC_RESTARTS} times; --reset-limit N changes that")
    return _ELASTIC_RESTARTS


def add_to(parser: argparse.ArgumentParser) -> None:
    """Let a parser of hvdrun's options understand horovodrun's."""
    parser.set_defaults(settings={})
    for option in OPTIONS:
        parser.add_argument(
            *option.flags,
            action=_Action,
            horovod=option,
            dest=argparse.SUPPRESS,
            nargs=option.values,
            help=argparse.SUPPRESS,
        )


@functools.cache
def _say_once(text: str) -> None:
    _say(text)


def _say(text: str) -> None:
    print(f"hvdrun: {text}", file=sys.stderr, flush=True)
