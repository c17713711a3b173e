"""The command line of hvdrun, and the file that can hold a part of it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hvd_keras
from hvd_keras.launch.errors import UsageError

USAGE = "hvdrun -np N [options] command [arguments ...]"
EXAMPLE = "hvdrun -np 2 python train.py"

DESCRIPTION = """\
Runs N ranks of a command, on this host or on several, for data-parallel training with hvd_keras.
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
    add(
        *("-np", "-n", "--num-proc"),
        metavar="N",
        dest="size",
        help="number of ranks (default: all slots of the hosts; on this host alone there is none)",
    )
    _add_hosts(parser.add_argument_group("several hosts"))
    _add_restarts(parser.add_argument_group("restarts"))
    _add_output(parser.add_argument_group("output"))
    add(
        "--config",
        metavar="FILE",
        help="a JSON object with long options as names, without their dashes, such as "
        '{"hosts": "server1:2,server2:2", "env": ["NAME"], "verbose": true}; what the command line '
        "says counts more (default: none)",
    )
    add(
        "--strict",
        action="store_true",
        help="make warnings of hvd_keras about a script that trains each rank by itself into "
        "errors, by HVD_STRICT=1 (default: off)",
    )
    add(
        "--oversubscribe",
        action="store_true",
        help="allow more ranks than usable cores or slots (default: off)",
    )
    add(
        "--check",
        action="store_true",
        help="print what hvd_keras was built with and runs on, and try every collective for two "
        "seconds, by default on two ranks; takes no command (default: off)",
    )
    add(
        "--mpirun",
        metavar="PATH",
        help="the mpirun to use (default: srun in an allocation of SLURM, else the one built with, "
        "else the one beside this Python, else the one on PATH)",
    )
    add(
        "--mpi-args",
        metavar="ARGS",
        default="",
        help="further arguments for mpirun or srun, in one string, quoted as in a shell; what "
        "mpirun prints itself is shown with --verbose (default: empty)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the environment settings and mpirun's command, and run nothing (default: off)",
    )
    # For hvd_keras.run: the process with which to end, as by SIGTERM, and the folder of the call.
    add("--call", nargs=2, metavar=("PID", "FOLDER"), help=argparse.SUPPRESS)
    add(
        "--version",
        action="version",
        version=f"hvdrun of hvd_keras {hvd_keras.__version__}",
        help="print the version and exit (default: off)",
    )
    add("command", nargs=argparse.REMAINDER, help="the command of each rank, with its arguments")
    return parser


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("-H", "--hosts"),
        metavar="HOSTS",
        help="server1:4,server2:4: hosts and how many ranks each takes; without a number, as many "
        "as it has usable cores (default: this host)",
    )
    add(
        "--hostfile",
        metavar="FILE",
        help="the same, one a line: server1:4 or server1 slots=4 (default: none)",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        help="a program that prints such lines; asked at the start, and again before each restart "
        "(default: none)",
    )
    add("--ssh-port", metavar="PORT", help="port of the hosts' ssh (default: ssh's own)")
    add("--ssh-identity-file", metavar="FILE", help="key for ssh (default: ssh's own)")
    add(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="pass this environment variable to the ranks of other hosts; may be repeated "
        "(default: PATH, LD_LIBRARY_PATH, and those that begin with HVD_, TF_, KERAS_, PYTHON, "
        "OMP_, XLA_, CUDA_, NCCL_, OMPI_MCA_, UCX_, FI_, I_MPI_ or MPICH_)",
    )
    add(
        "--network-interface",
        metavar="NAME",
        help="network between the hosts: an interface, such as eth0, or an address range, such as "
        "10.0.0.0/24 (default: the one through which all hosts are reached, if it is one)",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        default="120",
        help="how long the ranks on several hosts may take to start (default: %(default)s)",
    )


def _add_restarts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-restarts",
        metavar="N",
        default="0",
        help="start the command again when it has failed, at most so often; "
        "hvd.callbacks.Checkpoint lets the training go on (default: %(default)s)",
    )
    add(
        "--min-np",
        metavar="K",
        help="restart with fewer ranks, but at least so many, on the hosts that answer; else wait "
        "until enough do (default: as many as at the start)",
    )
    add(
        "--restart-timeout",
        metavar="SECONDS",
        default="600",
        help="how long to wait for enough hosts before a restart (default: %(default)s)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the rank before each line of output, as in '[0] text' (default: on)",
    )
    add(
        "--output-dir",
        metavar="FOLDER",
        help="write each rank's output, stdout and stderr, also to rank-N.txt there "
        "(default: none)",
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
        "--verbose",
        action="store_true",
        help="print the command that is run and mpirun's own messages to stderr (default: off)",
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, those of a configuration file included; raises UsageError."""
    options = _parser().parse_args(arguments)
    if options.config is None:
        return options
    given = _configuration(options.config)
    return _parser().parse_args([*given, *(sys.argv[1:] if arguments is None else arguments)])


def _configuration(path: str) -> list[str]:
    """The file's content as words of a command line."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--config got {path!r}, which cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: got {content!r:.99}; expected an object")
    words = []
    for name, value in content.items():
        if name == "config" or (value is False and name != "prefix"):
            expected = "leave it out"
        elif value is False:
            words.append(f"--no-{name}")
            continue
        elif value is True:
            words.append(f"--{name}")
            continue
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            words += [f"--{name}={one}" for one in value]
            continue
        elif isinstance(value, str | int):
            words.append(f"--{name}={value}")
            continue
        else:
            expected = "expected a text, a number, true, or a list of texts"
        raise UsageError(f"--config {path}: {name!r} is {value!r:.99}; {expected}")
    return words


def number(text: str, option: str, least: int, what: str = "number") -> int:
    """A whole number that is `least` or more."""
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise UsageError(f"{option} got {text!r}; expected a {what} from {least}")
    return int(text)


def words(text: str, option: str) -> list[str]:
    """The words of an option that holds several, quoted as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option} got {text!r}: {error}; expected arguments quoted as in a shell"
        ) from error
