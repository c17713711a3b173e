"""Horovod's settings, and what hvdrun knows of horovodrun: its options and its habits."""

import argparse
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from hvd_keras.horovod import PATH
from hvd_keras.launch.errors import UsageError, say, say_once
from hvd_keras.launch.options import Extension


def _bytes_of_megabytes(text: str) -> str:
    if not text.isdecimal():
        raise UsageError(f"--fusion-threshold-mb got {text!r}; expected a whole number of MiB")
    return str(max(1, int(text) << 20))


def _log_level(text: str) -> str:
    level = {"TRACE": "DEBUG", "FATAL": "ERROR"}.get(text.upper(), text.upper())
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise UsageError(f"the log level is {text!r}; expected debug, info, warning or error")
    return level


# Further names of hvdrun's options.
ALIASES = {
    "--nproc-per-node": ["--slots-per-host"],
    "--version": ["-v"],
    "--hostfile": ["-hostfile"],
    "--ssh-port": ["-p"],
    "--ssh-identity-file": ["-i"],
    "--check": ["-cb", "--check-build"],
    "--min-np": ["--min-num-proc"],
    "--max-np": ["--max-num-proc"],
    "--network-interface": ["--network-interfaces"],
    "--output-dir": ["--output-filename"],
    "--timeline": ["--timeline-filename"],
    "--max-restarts": ["--reset-limit"],
    "--restart-timeout": ["--elastic-timeout"],
}

# Options that stand for a setting, and how its value is made.
SETTING_OPTIONS: dict[str, tuple[str, Callable[[str], str]]] = {
    "--fusion-threshold-mb": ("HVD_BUCKET_BYTES", _bytes_of_megabytes),
    "--log-level": ("HVD_LOG_LEVEL", _log_level),
    "--stall-check-warning-time-seconds": ("HVD_STALL_WARNING_SECONDS", str),
    "--stall-check-shutdown-time-seconds": ("HVD_TIMEOUT_SECONDS", str),
}

# Options without effect, by how many words follow them.
NO_EFFECT = {
    0: "--stall-check --disable-cache --timeline-mark-cycles --no-timeline-mark-cycles "
    "--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather "
    "--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune "
    "--gloo --mpi --tcp --mpi-threads-disable --no-mpi-threads-disable -prefix-timestamp "
    "--prefix-output-with-timestamp --log-with-timestamp --log-without-timestamp "
    "--log-hide-timestamp --no-log-hide-timestamp",
    1: "--cycle-time-ms --cache-capacity --autotune-log-file --autotune-warmup-samples "
    "--autotune-steps-per-sample --autotune-bayes-opt-max-samples "
    "--autotune-gaussian-process-noise --gloo-timeout-seconds --thread-affinity --num-nccl-streams",
    2: "--blacklist-cooldown-range",
}

# Options that are errors, and what to do.
REFUSED = {
    "--jsrun": "start the script with jsrun, not hvdrun",
    "--binding-args": "use --mpi-args",
    "--config-file": "give the options on the command line",
}


class _NoCounterpart(argparse.Action):
    """Says that an option has no effect, or refuses it."""

    def __call__(self, *given: Any, **_: Any) -> None:
        option = given[3]
        if option in REFUSED:
            raise UsageError(f"{option} is an option of horovodrun; {REFUSED[option]}")
        say(f"{option} of horovodrun has no effect here")


# Horovod's settings that have a counterpart, and how its value is made; empty: as without it.
SETTINGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("HVD_BUCKET_BYTES", lambda text: text if text != "0" else "1"),
    "HOROVOD_LOG_LEVEL": ("HVD_LOG_LEVEL", _log_level),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("HVD_STALL_WARNING_SECONDS", str),
    "HOROVOD_STALL_CHECK_DISABLE": ("HVD_STALL_WARNING_SECONDS", lambda text: "0" * (text != "0")),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("HVD_TIMEOUT_SECONDS", str),
    # DYNAMIC: hvd.start_timeline starts it.
    "HOROVOD_TIMELINE": ("HVD_TIMELINE", lambda text: text * (text != "DYNAMIC")),
}

# For an elastic job, in which horovodrun replaces ranks as often as needed.
_ELASTIC_RESTARTS = 10


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What an environment needs besides: ``import horovod`` finds hvd_keras; Horovod's settings."""
    others = environment.get("PYTHONPATH")
    found = {"PYTHONPATH": os.pathsep.join(filter(None, [PATH, others]))}
    for theirs, (ours, convert) in SETTINGS.items():
        given = environment.get(theirs)
        if given and not environment.get(ours) and (value := convert(given)):
            found[ours] = value
            say_once(f"{theirs} is {ours}={value} here")
    return found


def _add_to(parser: argparse.ArgumentParser) -> None:
    """Let a parser of hvdrun's options understand horovodrun's that are no aliases."""
    text = (
        "let 'import horovod' find hvd_keras; elastic training restarts up to "
        f"{_ELASTIC_RESTARTS} times (default: off)"
    )
    group = parser.add_argument_group("programs written for Horovod")
    group.add_argument("--horovod", action="store_true", help=text)
    add = functools.partial(parser.add_argument, help=argparse.SUPPRESS)
    for flag, (name, convert) in SETTING_OPTIONS.items():
        pair = functools.partial(lambda name, convert, text: (name, convert(text)), name, convert)
        add(flag, dest="settings", action="append", type=pair)
    off = ("HVD_STALL_WARNING_SECONDS", "0")
    add("--no-stall-check", dest="settings", action="append_const", const=off)
    for count, flags in NO_EFFECT.items():
        add(*flags.split(), action=_NoCounterpart, dest=argparse.SUPPRESS, nargs=count)
    add(*REFUSED, action=_NoCounterpart, dest=argparse.SUPPRESS, nargs="?")


def _complete(given: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Do with `--horovod` what horovodrun would do."""
    if not given.horovod:
        return
    given.settings = settings(environment) | given.settings
    given.may_share_cores = True
    is_elastic = given.min_np is not None or given.host_discovery_script is not None
    if is_elastic and given.max_restarts is None:
        given.max_restarts = _ELASTIC_RESTARTS
        times = f"up to {_ELASTIC_RESTARTS} times"
        say(f"an elastic job restarts {times}; --reset-limit N changes that")


EXTENSION = Extension(ALIASES, _add_to, _complete)
