"""The command line of hvdrun."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hvd_keras
from hvd_keras.launch import UsageError, program, statistics, worker
from hvd_keras.launch.cores import thread_settings, usable_cores
from hvd_keras.launch.mpirun import find_mpirun
from hvd_keras.launch.supervise import Job, job_directory, signals_as_bytes

USAGE = "hvdrun -np N [options] command [arguments ...]"
EXAMPLE = "hvdrun -np 2 python train.py"

DESCRIPTION = """\
Runs N ranks of a command on this host, for data-parallel training with hvd_keras.
The exit status is 0 only if every rank has reported exit status 0; otherwise it is that of the
rank that failed first (128 + the number of the signal that killed it), 2 for a wrong command line,
130 after Ctrl-C. Options after the command belong to the command."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the whole usage, so that all errors look the same."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; expected: {USAGE}; see hvdrun --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hvdrun",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", metavar="N", dest="size", help="number of ranks (no default)")
    add(
        "--oversubscribe",
        action="store_true",
        help="allow more ranks than usable cores (default: off)",
    )
    add(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the rank before each line of output, as in '[0] text' (default: on)",
    )
    add(
        "--check",
        action="store_true",
        help="print what hvd_keras was built with and runs on, and try every collective for two "
        "seconds, by default on two ranks; takes no command (default: off)",
    )
    add(
        "--stats",
        action="store_true",
        help="print to stderr at the end how long the ranks waited, for which of them, and what "
        "moved (default: off)",
    )
    add(
        "--timeline",
        metavar="FILE",
        help="write what all ranks do to FILE, for https://ui.perfetto.dev or chrome://tracing "
        "(default: none)",
    )
    add(
        "--mpirun",
        metavar="PATH",
        help="the mpirun to use (default: the one built with, else the one beside this Python, "
        "else the one on PATH)",
    )
    add(
        "--mpi-args",
        metavar="ARGS",
        default="",
        help="further arguments for mpirun, in one string, quoted as in a shell; what mpirun "
        "prints itself is shown with --verbose (default: empty)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the environment settings and mpirun's command, and run nothing (default: off)",
    )
    add(
        "--verbose",
        action="store_true",
        help="print these and mpirun's own messages to stderr while running (default: off)",
    )
    add(
        "--version",
        action="version",
        version=f"hvdrun of hvd_keras {hvd_keras.__version__}",
        help="print the version and exit (default: off)",
    )
    add("command", nargs=argparse.REMAINDER, help="the command of each rank, with its arguments")
    return parser


def _size(text: str | None, oversubscribe: bool) -> int:
    """The number of ranks from the value of -np."""
    if text is None:
        raise UsageError(f"-np is missing; expected the number of ranks, for example: {EXAMPLE}")
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise UsageError(f"-np got {text!r}; expected a number of ranks from 1, as in: {EXAMPLE}")
    size, cores = int(text), usable_cores()
    if size > cores and not oversubscribe:
        raise UsageError(
            f"-np got {size}, but this process may use {cores} core{'s' * (cores != 1)}; expected "
            f"at most {cores}, or --oversubscribe to share cores among ranks, which is slow"
        )
    return size


def _observers(options: argparse.Namespace, directory: Path) -> dict[str, str]:
    """The settings of hvd_keras that make the ranks tell what they do."""
    settings = {}
    if options.timeline is not None:
        path = Path(options.timeline).absolute()
        if not options.timeline or path.is_dir() or not path.parent.is_dir():
            raise UsageError(
                f"--timeline got {options.timeline!r}; expected the path of a file in a folder "
                "that exists"
            )
        settings["HVD_TIMELINE"] = str(path)
    if options.stats:
        settings["HVD_STATS_DIRECTORY"] = str(directory)
    return settings


def _extra(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--mpi-args got {text!r}: {error}; expected arguments quoted as in a shell"
        ) from error


def _worker_command(directory: Path, hvdrun: str, command: Sequence[str]) -> list[str]:
    # As one JSON text the command is safe from mpirun, which would split it at a ":" for example.
    # -I -S: the worker needs nothing of the user's environment and starts in half the time.
    python = [sys.executable, "-I", "-S"]
    return [*python, worker.__file__, str(directory), hvdrun, json.dumps(command)]


def _describe(settings: dict[str, str], command: Sequence[str]) -> str:
    lines = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    return "\n".join([*lines, shlex.join(command)])


def _launch(options: argparse.Namespace) -> int:
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.check:
        if words:
            raise UsageError(f"--check got the command {shlex.join(words)!r}; it takes none")
        words = [sys.executable, "-m", "hvd_keras.check"]
        options.size = options.size or str(min(2, usable_cores()))
    size = _size(options.size, options.oversubscribe)
    if not words:
        raise UsageError(f"the command is missing; expected a program, for example: {EXAMPLE}")
    command = program.resolve(words)
    extra = _extra(options.mpi_args)
    mpirun = find_mpirun(options.mpirun)
    threads = thread_settings(size, os.environ)

    def plan(directory: Path, hvdrun: str) -> tuple[dict[str, str], list[str]]:
        settings = threads | _observers(options, directory)
        return settings | mpirun.settings(directory), mpirun.command(
            size,
            oversubscribe=options.oversubscribe,
            variables=settings,
            extra=extra,
            program=_worker_command(directory, hvdrun, command),
        )

    if options.dry_run:
        print(_describe(*plan(Path("JOB_DIRECTORY"), "HVDRUN_PID")))
        return 0
    with signals_as_bytes() as signals, job_directory() as directory:
        settings, mpirun_command = plan(directory, str(os.getpid()))
        if options.verbose:
            print(_describe(settings, mpirun_command), file=sys.stderr, flush=True)
        job = Job(
            mpirun_command,
            os.environ | settings,
            directory=directory,
            size=size,
            prefix=options.prefix,
            verbose=options.verbose,
        )
        verdict = job.run(signals)
        if options.stats:
            print(statistics.table(directory, size), file=sys.stderr, flush=True)
        return verdict.status


def _open_standard_streams() -> None:
    """Put the null device where the caller has closed one, lest another file takes its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hvdrun` with these arguments (default: the process's own); returns the exit status."""
    _open_standard_streams()
    try:
        return _launch(_parser().parse_args(arguments))
    except UsageError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return 2
