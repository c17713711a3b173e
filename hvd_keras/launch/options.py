"""The command line of hvdrun."""

import argparse
import functools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import hvd_keras
from hvd_keras.launch.errors import UsageError, say
from hvd_keras.launch.follow import statistics

USAGE = "hvdrun -np N [options] train.py [arguments ...]"
EXAMPLE = "hvdrun -np 2 train.py"

# The value of -np for one rank per GPU of the hosts, or per core without GPUs.
AUTO = 0
RESTART_TIMEOUT = 600  # the default of --restart-timeout

# The variables of hvdrun's environment that ranks on other hosts get; --env adds further ones.
PASSED = ("PATH", "LD_LIBRARY_PATH")
PASSED_PREFIXES = (
    *("HVD_", "TF_", "KERAS_", "PYTHON", "OMP_", "GOMP_", "KMP_", "XLA_", "CUDA_", "NCCL_"),
    *("OMPI_MCA_", "UCX_", "FI_", "I_MPI_", "MPICH_"),
)

DESCRIPTION = """\
Starts N processes (ranks) of a program, on this host or on several, for data-parallel training with
hvd_keras. The program is a Python file, "-m module", or any command. Options precede it; what
follows it are its arguments.

  hvdrun -np 4 train.py --epochs 3
  hvdrun -np 8 -H server1:4,server2:4 train.py

The exit status is 0 only if every rank has finished with exit status 0. Otherwise it is that of
the rank that failed first (128 + N if signal N killed it), 1 if none did but the job went wrong, 2
for a wrong command line, or 128 + N if signal N ended hvdrun (Ctrl-C: 130)."""


def _expect(fits: bool, option: str, text: str, expected: str) -> str:
    if not fits:
        raise UsageError(f"{option} got {text!r}; expected {expected}")
    return text


def _at_least(least: int, option: str, text: str, more: str = "") -> int:
    fits = text.isascii() and text.isdecimal() and int(text) >= least
    expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
    return int(_expect(fits, option, text, expected + more))


def _size(option: str, text: str) -> int:
    number = text.removeprefix("p")  # "-np2" is "-n p2" to argparse
    more = ", or auto for one rank per GPU, or per core without GPUs"
    return AUTO if number == "auto" else _at_least(1, option, number, more)


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option} got {text!r}: {error}; expected arguments quoted as in a shell"
        ) from error


def _variable(option: str, text: str) -> str:
    return _expect(text in os.environ, option, text, "the name of a variable that is set")


def _new_file(option: str, text: str) -> str:
    path = Path(text).absolute()
    fits = text != "" and not path.is_dir() and path.parent.is_dir()
    return _expect(fits, option, text, "the path of a file in an existing folder")


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        option = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        near = get_close_matches(option, self._option_string_actions, 1)
        hint = "".join(f" (did you mean {name}?)" for name in near)
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


# The groups of options, each as "--flag --other METAVAR: help"; without METAVAR it is on or off.
OPTIONS = f"""\
usual options
-np -n --num-proc N: number of ranks, or auto: all slots of the hosts, where a host without a number
    has one for each GPU, or for each usable core without GPUs (default, with -H: all slots, one for
    each usable core)
-H --hosts HOSTS: server1:4,server2:4: hosts and the number of ranks on each; without a number, one
    rank per usable core (default: this host)
--oversubscribe: allow more ranks than usable cores or slots (default: off)
-m MODULE: run a Python module, as `python -m MODULE` does; all that follows are its arguments
    (default: none)
--max-restarts N: maximum number of restarts after a failure; hvd.callbacks.Checkpoint lets training
    resume (default: 0)
--output-dir FOLDER: also write each rank's stdout and stderr to rank-N.txt in this folder (default:
    none)
--stats: at the end, print to stderr how long the ranks waited, for which one, and the bytes
    exchanged (default: off)
--verbose: print mpirun's command and its own messages to stderr (default: off)
--check: print the installation and run a self-test of every collective for two seconds, by default
    on two ranks; takes no command (default: off)
-h --help: print this text and exit

output
--prefix: prefix each line of output with its rank, as in '[0] text' (default: on). Python
    in ranks does not buffer it, unless PYTHONUNBUFFERED is set to nothing
--metrics PORT: serve the numbers of --stats for Prometheus at this port of 127.0.0.1, or at
    ADDRESS:PORT (default: none)
--postmortem FOLDER: after a failure, keep each rank's last requests and stacks in this folder, and
    say which rank did something else first (default: none)
--timeline FILE: record a timeline of all ranks in FILE, on several hosts in a shared folder, for
    https://ui.perfetto.dev or chrome://tracing (default: none)

several hosts
--nproc-per-node --nproc_per_node N: number of ranks on each host that is named without a number
    (default: one per usable core)
--hostfile FILE: file with one host per line: server1:4 or server1 slots=4 (default: none)
--host-discovery-script COMMAND: a program that prints such lines; run at the start and before each
    restart (default: none)
--ssh-port PORT: ssh port of the hosts (default: ssh's own)
--ssh-identity-file FILE: key for ssh (default: ssh's own)
--remote-shell PROGRAM: the program by which hosts are reached, with its options in one string: it
    is called as ssh is, and exits with 255 if it cannot reach the host; or 'kubectl exec', with
    hosts that are pods (default: ssh)
--env NAME: pass this environment variable to ranks on other hosts; may be repeated (default:
    {", ".join(PASSED)}, and variables that begin with {", ".join(PASSED_PREFIXES[:-1])} or
    {PASSED_PREFIXES[-1]})
--network-interface NAME: network between the hosts: an interface, such as eth0, or an address
    range, such as 10.0.0.0/24 (default: the network through which all hosts are reached, if there
    is only one)
--wait-for-hosts SECONDS: how long to wait before the first start for hosts that cannot be reached
    or are not listed yet, such as containers that are starting (default: %(default)s)
--start-timeout SECONDS: time limit for starting ranks on several hosts (default: %(default)s)

restarts and the end
--min-np K: minimum number of ranks for a restart on the hosts that answer; hvdrun waits until there
    are enough slots (default: as many as at the start)
--max-np K: maximum number of ranks for a restart, when hosts have been added (default: as many as
    at the start)
--restart-timeout SECONDS: how long to wait for enough slots before a restart (default: %(default)s)
--stop-timeout SECONDS: how long ranks may take to save their work when a signal asks hvdrun to end,
    until they are killed; a second Ctrl-C does not wait (default: %(default)s)

programs
--bind: give each rank of a host cores of its own, unless there are fewer cores than ranks, or the
    user or SLURM has bound the ranks (default: on)
--strict: turn warnings that results differ from those of one process into errors; sets HVD_STRICT=1
    for the ranks (default: off: only ranks that train separate models get errors, and with
    HVD_STRICT=0 warnings)
--no-init: allow ranks that end without having completed hvd.init(), as those of a command that does
    not use hvd_keras (default: off: exit status 1, unless there is one rank)

MPI
--mpirun PATH: the mpirun to use (default: srun in a SLURM allocation, else that of the build, else
    the one beside this Python, else the one on PATH)
--mpi-args ARGS: further arguments for mpirun or srun, in one string, quoted as in a shell; add
    --verbose to see mpirun's own messages (default: empty)

hvdrun itself
--dry-run: print the environment settings and mpirun's command, and stop (default: off)
--completion: print a script that completes options in bash and zsh, and exit; use it by eval
    "$(hvdrun --completion)" (default: off)
--version: print the version and exit (default: off)
"""

# What the text does not say: how argparse treats an option. A type takes the option, too.
_WORDS, _POSITIVE = {"type": _words}, {"type": functools.partial(_at_least, 1)}
_NOT_NEGATIVE = {"type": functools.partial(_at_least, 0)}
_DETAILS: dict[str, dict[str, Any]] = {
    "-np": {"dest": "size", "type": _size},
    "-m": {"dest": "module", "nargs": argparse.REMAINDER},
    "-h": {"action": "help"},
    "--bind": {"action": argparse.BooleanOptionalAction},
    "--prefix": {"action": argparse.BooleanOptionalAction},
    "--nproc-per-node": {"dest": "per_host", **_POSITIVE},
    "--env": {"action": "append", "type": _variable, "default": []},
    "--timeline": {"type": _new_file},
    "--metrics": {"type": statistics.parse_address},
    "--version": {"action": "version", "version": f"hvdrun of hvd_keras {hvd_keras.__version__}"},
    "--host-discovery-script": _WORDS,
    "--remote-shell": {**_WORDS, "default": []},
    "--mpi-args": {**_WORDS, "default": []},
    **dict.fromkeys(("--ssh-port", "--min-np", "--max-np"), _POSITIVE),
    "--max-restarts": _NOT_NEGATIVE,
    "--wait-for-hosts": {**_NOT_NEGATIVE, "default": 0},
    "--start-timeout": {**_POSITIVE, "default": 120},
    "--restart-timeout": {**_NOT_NEGATIVE, "default": RESTART_TIMEOUT},
    "--stop-timeout": {**_NOT_NEGATIVE, "default": 20},
}


@dataclass(frozen=True)
class Extension:
    """What another package adds to hvdrun's command line."""

    aliases: Mapping[str, Sequence[str]]  # further names of options, which --help does not show
    add_to: Callable[[argparse.ArgumentParser], None]  # adds options
    # Takes what was given, and hvdrun's environment.
    complete: Callable[[argparse.Namespace, Mapping[str, str]], None]


def _parser(extensions: Sequence[Extension]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hvdrun",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for described in OPTIONS.split("\n\n"):
        title, *entries = re.split(r"\n(?=-)", described)
        group = parser.add_argument_group(title)
        for entry in entries:
            names, _, text = entry.partition(": ")
            *flags, last = names.split()
            kwargs: dict[str, Any] = {"metavar": last}
            if last.startswith("-"):
                flags, kwargs = [*flags, last], {"action": "store_true"}
            kwargs |= {"help": " ".join(text.split())} | _DETAILS.get(flags[0], {})
            if "type" in kwargs:
                kwargs["type"] = functools.partial(kwargs["type"], flags[0])
            action = group.add_argument(*flags, **kwargs)
            for extension in extensions:
                if others := extension.aliases.get(flags[0]):
                    hidden = {"dest": action.dest, "help": argparse.SUPPRESS}
                    group.add_argument(*others, **{**kwargs, **hidden})
    # For hvd_keras.run: the process with which to end, as by SIGTERM, and the folder of the call.
    parser.add_argument("--call", nargs=2, metavar=("PID", "FOLDER"), help=argparse.SUPPRESS)
    for extension in extensions:
        extension.add_to(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    # For extensions: whether more ranks than cores on this host are worth a word, no error.
    parser.set_defaults(bind=True, prefix=True, settings=[], may_share_cores=False)
    return parser


def parse(arguments: Sequence[str] | None, extensions: Sequence[Extension]) -> argparse.Namespace:
    """Parse the command line (default: the process's own). Raises UsageError."""
    parser = _parser(extensions)
    given = parser.parse_args(arguments)
    if given.completion:
        flags = parser._option_string_actions.items()
        names = [flag for flag, action in flags if action.help != argparse.SUPPRESS]
        print(_COMPLETION.format(options=" ".join(names)), end="")
        parser.exit()
    if given.module:
        given.command = ["-m", *given.module]
    elif given.command[:1] == ["--"]:
        del given.command[0]
    given.settings = dict(given.settings)
    for extension in extensions:
        extension.complete(given, os.environ)
    given.max_restarts = given.max_restarts or 0
    return given


def tell_without_effect(given: argparse.Namespace) -> None:
    """Say which options have no effect, because there are no restarts."""
    usual = {"--min-np": None, "--max-np": None, "--restart-timeout": RESTART_TIMEOUT}
    idle = [flag for flag in usual if vars(given)[flag[2:].replace("-", "_")] != usual[flag]]
    if idle and not given.max_restarts:
        say(f"{', '.join(idle)}: no effect without restarts; add --max-restarts N")
