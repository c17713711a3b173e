"""The command line of hvdrun."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import NoReturn

import hvd_keras
from hvd_keras.launch import horovodrun
from hvd_keras.launch.errors import UsageError

USAGE = "hvdrun -np N [options] command [arguments ...]"
EXAMPLE = "hvdrun -np 2 python train.py"

DESCRIPTION = """\
Starts N ranks of a command, on this host or on several, for data-parallel training with hvd_keras.
The exit status is 0 only if every rank has finished with exit status 0. Otherwise it is that of the
rank that failed first (128 + N if signal N killed it), 2 for a wrong command line, or 130 after
Ctrl-C. Options must precede the command; what follows it belongs to the command."""


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and exiting."""

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
        help="number of ranks (default: all slots of the hosts; required on this host alone)",
    )
    _add_hosts(parser.add_argument_group("several hosts"))
    _add_restarts(parser.add_argument_group("restarts"))
    _add_output(parser.add_argument_group("output"))
    add(
        "--strict",
        action="store_true",
        help="turn hvd_keras's warnings about ranks that train separate models into errors; sets "
        "HVD_STRICT=1 for the ranks (default: off)",
    )
    add(
        "--horovod",
        action="store_true",
        help="let 'import horovod' find hvd_keras, for programs written for Horovod (default: off)",
    )
    add(
        "--separate",
        action="store_true",
        help="allow that ranks of a program that uses hvd_keras end without having completed "
        "hvd.init() (default: off: exit status 1)",
    )
    add(
        "--oversubscribe",
        action="store_true",
        help="allow more ranks than usable cores or slots (default: off)",
    )
    add(
        "--check",
        action="store_true",
        help="print the installation and run a self-test of every collective for two seconds, by "
        "default on two ranks; takes no command (default: off)",
    )
    add(
        "--mpirun",
        metavar="PATH",
        help="the mpirun to use (default: srun in a SLURM allocation, else that of the build, "
        "else the one beside this Python, else the one on PATH)",
    )
    add(
        "--mpi-args",
        metavar="ARGS",
        default="",
        help="further arguments for mpirun or srun, in one string, quoted as in a shell; add "
        "--verbose to see mpirun's own messages (default: empty)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the environment settings and mpirun's command, and stop (default: off)",
    )
    # For hvd_keras.run: the process with which to end, as by SIGTERM, and the folder of the call.
    add("--call", nargs=2, metavar=("PID", "FOLDER"), help=argparse.SUPPRESS)
    add(
        "--version",
        action="version",
        version=f"hvdrun of hvd_keras {hvd_keras.__version__}",
        help="print the version and exit (default: off)",
    )
    horovodrun.add_to(parser)
    add("command", nargs=argparse.REMAINDER, help="the command of each rank, with its arguments")
    return parser


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("-H", "--hosts"),
        metavar="HOSTS",
        help="server1:4,server2:4: hosts and the number of ranks on each; without a number, one "
        "rank per usable core (default: this host)",
    )
    add(
        "--hostfile",
        metavar="FILE",
        help="file with one host per line: server1:4 or server1 slots=4 (default: none)",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        help="a program that prints such lines; run at the start and before each restart "
        "(default: none)",
    )
    add("--ssh-port", metavar="PORT", help="ssh port of the hosts (default: ssh's own)")
    add("--ssh-identity-file", metavar="FILE", help="key for ssh (default: ssh's own)")
    add(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="pass this environment variable to ranks on other hosts; may be repeated "
        "(default: PATH, LD_LIBRARY_PATH, and variables that begin with HVD_, TF_, KERAS_, PYTHON, "
        "OMP_, XLA_, CUDA_, NCCL_, OMPI_MCA_, UCX_, FI_, I_MPI_ or MPICH_)",
    )
    add(
        "--network-interface",
        metavar="NAME",
        help="network between the hosts: an interface, such as eth0, or an address range, such as "
        "10.0.0.0/24 (default: the network through which all hosts are reached, if there is only "
        "one)",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        default="120",
        help="time limit for starting ranks on several hosts (default: %(default)s)",
    )


def _add_restarts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-restarts",
        metavar="N",
        default="0",
        help="maximum number of restarts after a failure; hvd.callbacks.Checkpoint lets training "
        "resume (default: %(default)s)",
    )
    add(
        "--min-np",
        metavar="K",
        help="minimum number of ranks for a restart on the hosts that answer; hvdrun waits until "
        "there are enough slots (default: as many as at the start)",
    )
    add(
        "--restart-timeout",
        metavar="SECONDS",
        default="600",
        help="how long to wait for enough slots before a restart (default: %(default)s)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefix each line of output with its rank, as in '[0] text' (default: on)",
    )
    add(
        "--output-dir",
        metavar="FOLDER",
        help="also write each rank's stdout and stderr to rank-N.txt in this folder "
        "(default: none)",
    )
    add(
        "--stats",
        action="store_true",
        help="at the end, print to stderr how long the ranks waited, for which ranks, and the "
        "bytes exchanged (default: off)",
    )
    add(
        "--timeline",
        metavar="FILE",
        help="record a timeline of all ranks in FILE, for https://ui.perfetto.dev or "
        "chrome://tracing (default: none)",
    )
    add(
        "--verbose",
        action="store_true",
        help="print mpirun's command and its own messages to stderr (default: off)",
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line (default: the process's own). Raises UsageError."""
    return _parser().parse_args(arguments)


def number(text: str, option: str, least: int, what: str = "number") -> int:
    """Parse an integer that is at least `least`. Raises UsageError."""
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise UsageError(f"{option} got {text!r}; expected a {what} of at least {least}")
    return int(text)


def words(text: str, option: str) -> list[str]:
    """Split the value of an option that holds several words, quoted as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option} got {text!r}: {error}; expected arguments quoted as in a shell"
        ) from error
