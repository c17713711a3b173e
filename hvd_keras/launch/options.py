"""The command line of hvdrun."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import hvd_keras
from hvd_keras.launch import horovodrun
from hvd_keras.launch.errors import UsageError

USAGE = "hvdrun -np N [options] train.py [arguments ...]"
EXAMPLE = "hvdrun -np 2 train.py"

# What -np says for as many ranks as the hosts have GPUs, or cores without GPUs.
AUTO = 0

DESCRIPTION = """\
Starts N processes (ranks) of a program, on this host or on several, for data-parallel training with
hvd_keras. The program is a Python file, "-m module", or any command. Options precede it; what
follows it are its arguments.

  hvdrun -np 4 train.py --epochs 3
  hvdrun -np 8 -H server1:4,server2:4 train.py

The exit status is 0 only if every rank has finished with exit status 0. Otherwise it is that of the
rank that failed first (128 + N if signal N killed it), 2 for a wrong command line, or 130 after
Ctrl-C."""


def _at_least(least: int, option: str) -> Callable[[str], int]:
    """The type of an option that takes an integer of at least `least`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise UsageError(f"{option} got {text!r}; expected {expected}")
        return int(text)

    return parse


def _size(text: str) -> int:
    """The type of -np, which gets "p2" of "-np2" by way of -n."""
    number = text.removeprefix("p")
    return AUTO if number == "auto" else _at_least(1, "-np")(number)


def _words(option: str) -> Callable[[str], list[str]]:
    """The type of an option that takes several words, quoted as in a shell."""

    def parse(text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise UsageError(
                f"{option} got {text!r}: {error}; expected arguments quoted as in a shell"
            ) from error

    return parse


def _one_interface(text: str) -> str:
    if "," in text:
        raise UsageError(f"--network-interface got {text!r}; expected one interface")
    return text


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        option = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        known = [name for name in self._option_string_actions if name != option]
        hint = "".join(f" (did you mean {name}?)" for name in get_close_matches(option, known, 1))
        raise UsageError(f"{message}{hint}; expected: {USAGE}; see hvdrun --help")


# Works in zsh, too, by its emulation of bash's completion.
_COMPLETION = """\
[ -z "$ZSH_VERSION" ] || {{ autoload -U +X compinit bashcompinit && compinit && bashcompinit; }}
_hvdrun() {{
  local word given=${{COMP_WORDS[COMP_CWORD]}}
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
    case $word in *.py | -m) return ;; esac
  done
  case $given in -*) COMPREPLY=($(compgen -W "{options}" -- "$given")) ;; esac
}}
complete -o default -F _hvdrun hvdrun
"""


class _Completion(argparse.Action):
    """Prints _COMPLETION with the options that --help lists."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """From argparse."""
        flags = parser._option_string_actions.items()
        names = [flag for flag, action in flags if action.help != argparse.SUPPRESS]
        print(_COMPLETION.format(options=" ".join(names)), end="")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hvdrun",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    _add_usual(parser.add_argument_group("usual options"))
    _add_output(parser.add_argument_group("output"))
    _add_hosts(parser.add_argument_group("several hosts"))
    _add_restarts(parser.add_argument_group("restarts and the end"))
    _add_programs(parser.add_argument_group("programs"))
    _add_mpi(parser.add_argument_group("MPI"))
    _add_itself(parser.add_argument_group("hvdrun itself"))
    # For hvd_keras.run: the process with which to end, as by SIGTERM, and the folder of the call.
    parser.add_argument("--call", nargs=2, metavar=("PID", "FOLDER"), help=argparse.SUPPRESS)
    horovodrun.add_to(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ArgumentGroup, *flags: str, **kwargs: Any) -> None:
    """Add an option, and horovodrun's names for it, which --help does not list."""
    action = group.add_argument(*flags, **kwargs)
    if names := horovodrun.ALIASES.get(flags[0]):
        group.add_argument(*names, **{**kwargs, "dest": action.dest, "help": argparse.SUPPRESS})


def _add_usual(group: argparse._ArgumentGroup) -> None:
    add = functools.partial(_add, group)
    add(
        *("-np", "-n", "--num-proc"),
        metavar="N",
        dest="size",
        type=_size,
        help="number of ranks, or auto: all slots of the hosts, where a host without a number has "
        "one for each GPU, or for each usable core without GPUs (default: all slots, one for each "
        "usable core; required on this host alone)",
    )
    add(
        *("-H", "--hosts"),
        metavar="HOSTS",
        help="server1:4,server2:4: hosts and the number of ranks on each; without a number, one "
        "rank per usable core (default: this host)",
    )
    add(
        "--oversubscribe",
        action="store_true",
        help="allow more ranks than usable cores or slots (default: off)",
    )
    add(
        "-m",
        metavar="MODULE",
        dest="module",
        nargs=argparse.REMAINDER,
        help="run a Python module, as `python -m MODULE` does; all that follows are its arguments "
        "(default: none)",
    )
    add(
        "--max-restarts",
        metavar="N",
        type=_at_least(0, "--max-restarts"),
        help="maximum number of restarts after a failure; hvd.callbacks.Checkpoint lets training "
        "resume (default: 0; 10 for elastic training with --horovod)",
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
        help="show in a terminal how fast the ranks train and which one the others wait for; at "
        "the end, print to stderr how long they waited and the bytes exchanged (default: off)",
    )
    add(
        "--verbose",
        action="store_true",
        help="print mpirun's command and its own messages to stderr (default: off)",
    )
    add(
        "--check",
        action="store_true",
        help="print the installation and run a self-test of every collective for two seconds, by "
        "default on two ranks; takes no command (default: off)",
    )
    add("-h", "--help", action="help", help="print this text and exit")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = functools.partial(_add, group)
    add(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefix each line of output with its rank, as in '[0] text' (default: on)",
    )
    add(
        "--metrics",
        metavar="PORT",
        help="serve the numbers of --stats for Prometheus at this port of 127.0.0.1, or at "
        "ADDRESS:PORT (default: none)",
    )
    add(
        "--postmortem",
        metavar="FOLDER",
        help="after a failure, keep each rank's last requests and stacks in this folder, and say "
        "which rank did something else first (default: none)",
    )
    add(
        "--timeline",
        metavar="FILE",
        help="record a timeline of all ranks in FILE, for https://ui.perfetto.dev or "
        "chrome://tracing (default: none)",
    )


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = functools.partial(_add, group)
    add(
        *("--nproc-per-node", "--nproc_per_node"),
        metavar="N",
        dest="per_host",
        type=_at_least(1, "--nproc-per-node"),
        help="number of ranks on each host that is named without a number (default: one per usable "
        "core)",
    )
    add(
        "--hostfile",
        metavar="FILE",
        help="file with one host per line: server1:4 or server1 slots=4 (default: none)",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        type=_words("--host-discovery-script"),
        help="a program that prints such lines; run at the start and before each restart "
        "(default: none)",
    )
    add(
        "--ssh-port",
        metavar="PORT",
        type=_at_least(1, "--ssh-port"),
        help="ssh port of the hosts (default: ssh's own)",
    )
    add("--ssh-identity-file", metavar="FILE", help="key for ssh (default: ssh's own)")
    add(
        "--remote-shell",
        metavar="PROGRAM",
        type=_words("--remote-shell"),
        default="",
        help="the program by which hosts are reached, with its options in one string: it is called "
        "as ssh is, and exits with 255 if it cannot reach the host; or 'kubectl exec', with hosts "
        "that are pods (default: ssh)",
    )
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
        type=_one_interface,
        help="network between the hosts: an interface, such as eth0, or an address range, such as "
        "10.0.0.0/24 (default: the network through which all hosts are reached, if there is only "
        "one)",
    )
    add(
        "--wait-for-hosts",
        metavar="SECONDS",
        type=_at_least(0, "--wait-for-hosts"),
        default=0,
        help="how long to wait before the first start for hosts that cannot be reached yet, such "
        "as containers that are starting (default: %(default)s)",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        type=_at_least(1, "--start-timeout"),
        default=120,
        help="time limit for starting ranks on several hosts (default: %(default)s)",
    )


def _add_restarts(group: argparse._ArgumentGroup) -> None:
    add = functools.partial(_add, group)
    add(
        "--min-np",
        metavar="K",
        type=_at_least(1, "--min-np"),
        help="minimum number of ranks for a restart on the hosts that answer; hvdrun waits until "
        "there are enough slots (default: as many as at the start)",
    )
    add(
        "--restart-timeout",
        metavar="SECONDS",
        type=_at_least(0, "--restart-timeout"),
        default=600,
        help="how long to wait for enough slots before a restart (default: %(default)s)",
    )
    add(
        "--stop-timeout",
        metavar="SECONDS",
        type=_at_least(0, "--stop-timeout"),
        default=20,
        help="how long ranks may take to save their work when a signal asks hvdrun to end, until "
        "they are killed; a second Ctrl-C does not wait (default: %(default)s)",
    )


def _add_programs(group: argparse._ArgumentGroup) -> None:
    add = functools.partial(_add, group)
    add(
        "--horovod",
        action="store_true",
        help="let 'import horovod' find hvd_keras, for programs written for Horovod (default: off)",
    )
    add(
        "--strict",
        action="store_true",
        help="turn hvd_keras's warnings about ranks that train separate models into errors; sets "
        "HVD_STRICT=1 for the ranks (default: off)",
    )
    add(
        "--separate",
        action="store_true",
        help="allow that ranks of a program that uses hvd_keras end without having completed "
        "hvd.init() (default: off: exit status 1)",
    )


def _add_itself(group: argparse._ArgumentGroup) -> None:
    add = functools.partial(_add, group)
    add(
        "--dry-run",
        action="store_true",
        help="print the environment settings and mpirun's command, and stop (default: off)",
    )
    add(
        "--completion",
        action=_Completion,
        nargs=0,
        help="print a script that completes options in bash and zsh, and exit; use it by "
        'eval "$(hvdrun --completion)" (default: off)',
    )
    add(
        "--version",
        action="version",
        version=f"hvdrun of hvd_keras {hvd_keras.__version__}",
        help="print the version and exit (default: off)",
    )


def _add_mpi(group: argparse._ArgumentGroup) -> None:
    add = functools.partial(_add, group)
    add(
        "--mpirun",
        metavar="PATH",
        help="the mpirun to use (default: srun in a SLURM allocation, else that of the build, "
        "else the one beside this Python, else the one on PATH)",
    )
    add(
        "--mpi-args",
        metavar="ARGS",
        type=_words("--mpi-args"),
        default="",
        help="further arguments for mpirun or srun, in one string, quoted as in a shell; add "
        "--verbose to see mpirun's own messages (default: empty)",
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line (default: the process's own). Raises UsageError."""
    given = _parser().parse_args(arguments)
    given.settings = dict(given.settings)
    if given.max_restarts is None:
        given.max_restarts = horovodrun.restarts(given)
    return given
