"""Starts ranks in a tenth of a second: as forks of a process that has imported Keras.

Each rank tells by `hvd.init()` what it has imported. For restarts, the first such word on a host
has a worker start the server, which imports the same while the job runs. With `HVD_KEEP_IMPORTS`,
the first job's workers start it, and later jobs find it. In a fork, which has the files, cores and
environment of a worker, the script runs from its first line, as in a new Python. (The fork server
of `multiprocessing` serves one process alone, and its forks leave out how Python ends.)
"""

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import divide_python, is_python, program
from .limits import SERVER_ANSWER, SERVER_START
from .process import JOB, prepare, refuse_other_users
from .script import folder_of, run

# Environment variables: for how many seconds a server that all jobs share stays without a job; and
# that a rank is a fork of such a server.
KEEP = "HVD_KEEP_IMPORTS"
FORKED = "HVDRUN_FORKED"

_NICE = 10  # of the imports, beside ranks that train
# Bytes of a message at most, and files that come with it.
_MESSAGE, _FILES = 1 << 20, 100
_ROOM = 1 << 14  # bytes for the arguments of a fork, and for its environment beyond the server's
_FILL = "HVDRUN_ROOM"  # the variable of the server that makes this room
_OPTIONS = re.compile("-[uOB]+")  # those of Python that a server can take

# Variables that nothing reads while Keras is imported, and that differ between ranks or jobs.
_LATE = re.compile(
    "(HVD|HVDRUN|OMPI|PMIX|PRTE|PMI|MPI|MPIR|MPICH|HYDRA|HYDI|SLURM|NCCL|UCX|TF_NUM|PYTEST)_.*"
    "|CUDA_VISIBLE_DEVICES|TMPDIR|PWD|OLDPWD|SHLVL|_"
)
# What a fork has from its server and cannot change, in /proc/self/status.
_STATUS = re.compile("^(?:Umask|Groups|SigBlk|Cap|NoNewPrivs|Seccomp).*", re.MULTILINE)

# What no process can choose, and what each Python ignores.
_OWN_SIGNALS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each message is received whole


def _words(command: Sequence[str]) -> list[str]:
    """Return the script, or ``-m`` and the module, and its arguments; empty for other programs."""
    options, words = divide_python(command[1:])
    is_script = bool(words) and (words[0] == "-m" or words[0].endswith(".py"))
    fits = is_script and is_python(command[0]) and all(map(_OPTIONS.fullmatch, options))
    return words if fits else []


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be read while Keras is imported."""
    return {name: value for name, value in environment.items() if not _LATE.fullmatch(name)}


class Child:
    """A process that a server has forked, as `subprocess.Popen` shows one."""

    def __init__(self, connection: socket.socket, server: int, process: int) -> None:
        self.connection, self._server, self.pid = connection, server, process
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it has ended; None if it has not."""
        if self.returncode is None:
            try:
                data = self.connection.recv(_MESSAGE)
            except BlockingIOError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._server, signal.SIGCONT)  # while it is stopped, it tells nothing
                return None
            # Without its server, it is killed.
            self.returncode = json.loads(data) if data else -signal.SIGKILL
        return self.returncode


class Server:
    """The server of this host whose forks are as new processes of this one would be.

    `salt` is known to the jobs that share it, `order` is what `run_job` describes, `environment`
    that of a rank. Raises OSError if this process cannot know all that matters.
    """

    def __init__(self, salt: str, order: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._order, self._environment = order, environment
        this, found = Path("/proc/self"), early(environment)
        if "PYTHONPATH" in found:
            folders = found["PYTHONPATH"].split(":")
            found["PYTHONPATH"] = ":".join(os.path.join(order["directory"], x) for x in folders)
        self._words = _words(order["command"])
        self._python = order["command"][: len(order["command"]) - len(self._words)]
        same = [salt, self._python, sorted(found.items())]
        same += [os.stat("/").st_ino, os.stat(__file__).st_mtime]
        same += [os.sched_getscheduler(0), *map(resource.getrlimit, range(16))]
        same += [os.getpriority(os.PRIO_PROCESS, 0), _STATUS.findall((this / "status").read_text())]
        same += [(this / name).read_text() for name in ("cgroup", "personality", "oom_score_adj")]
        same += [os.readlink(path) for path in sorted((this / "ns").iterdir())]
        home = environment.get("KERAS_HOME") or Path(environment.get("HOME", "/"), ".keras")
        with contextlib.suppress(OSError):  # which Keras reads when it is imported
            same.append(Path(home, "keras.json").read_bytes())
        # It needs no file.
        digest = hashlib.sha256(repr(same).encode()).hexdigest()
        self._address = f"\0hvdrun-{os.geteuid()}-{digest}"

    def start(
        self,
        environment: Mapping[str, str],
        modules: Mapping[str, str | None],
        *,
        delay: float = 0.0,
        idle: float,
    ) -> socket.socket | None:
        """Start it with this environment; returns a connection that keeps it.

        None if it is there already, or cannot fork the command. It imports the `modules`, from
        these files if they are named, after `delay` seconds, and then leaves the processor to
        others. It ends `idle` seconds after its last connection.
        """
        if not self._words:
            return None
        with _socket() as listener:
            try:
                listener.bind(self._address)
            except OSError:  # another worker has started it
                return None
            listener.listen(socket.SOMAXCONN)
            room = _ROOM + sum(len(os.fsencode(f"{k}={v}")) for k, v in environment.items())
            words = [str(delay), str(idle), json.dumps(modules), "." * _ROOM]
            subprocess.Popen(
                [*self._python, *program("launch.onhost.fork_server")[3:], *words],
                cwd=self._order["directory"],
                env={**environment, _FILL: "." * room},
                stdin=listener.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # it outlives the job's first start
            )
        connection = _socket()
        connection.connect(self._address)
        return connection

    def fork(self, streams: Sequence[int], patience: float = SERVER_ANSWER) -> Child | None:
        """Have it start a rank with these standard streams; None without an answer in time."""
        # MPICH's ranks talk to mpirun through a descriptor that they inherit.
        there = [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]
        inherited = [n for n in map(int, there) if n > 2 and os.get_inheritable(n)]
        rank = {
            "descriptors": [0, 1, 2, *inherited],
            "environment": dict(self._environment),
            "cores": list(os.sched_getaffinity(0)),
            "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
        }
        connection = _socket()
        connection.settimeout(patience)
        try:
            connection.connect(self._address)
            refuse_other_users(connection)
            message = json.dumps({**self._order, **rank}).encode()
            socket.send_fds(connection, [message], [*streams, *inherited])
            server, process = json.loads(connection.recv(_MESSAGE))
        except (OSError, ValueError):
            connection.close()
            return None
        connection.setblocking(False)
        return Child(connection, server, process)


def fork_kept(
    order: Mapping[str, Any], environment: Mapping[str, str], streams: Sequence[int]
) -> Child | None:
    """Fork from the server that all jobs share, which is started if needed."""
    server = Server("", order, {**environment, FORKED: "1"})
    is_legacy = environment.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true")
    modules = {"tensorflow" if is_legacy else "keras": None}
    kept = server.start(early(environment), modules, idle=float(environment[KEEP]))
    with kept or contextlib.nullcontext():
        return server.fork(streams, SERVER_START)


def _serve(listener: socket.socket, idle: float, started: float) -> socket.socket | None:
    """Fork a keeper for each worker that connects, which returns that; None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    unneeded = 0  # at how many looks in a row there was no keeper
    while unneeded < 2:
        if select.select([listener], [], [], idle)[0]:
            connection, _ = listener.accept()
            if any(os.stat(place).st_mtime > started for place in _places().values()):
                return None  # what was imported has changed
            with contextlib.suppress(OSError):  # there is no room for a process
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    listener.close()
                    return connection
            connection.close()
            unneeded = 0
        else:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                unneeded += 1
    return None


def _keep(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a worker's rank and tell how it ends; returns in the rank the order and the files."""
    refuse_other_users(connection)
    message, given, _, _ = socket.recv_fds(connection, _MESSAGE, _FILES)
    order = json.loads(message)
    order["keeper"] = os.getpid()
    # As those of a worker, for `settings.launched_above`.
    _show(["hvdrun: keeps a rank"], {**order["environment"], "HVDRUN_SECRET": ""})
    os.chdir(order["directory"])
    beside = {name.partition(".")[0] for name in os.listdir(folder_of(_words(order["command"])))}
    if beside & _places().keys() or select.select([connection], [], [], 0)[0]:
        raise TimeoutError  # a new Python would import others; or the worker waits no more
    process = os.fork()
    if process == 0:
        connection.close()
        return order, given
    for descriptor in given:
        os.close(descriptor)
    over = threading.Event()

    def tell_end() -> None:
        found = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # its number stays its own
        assert found is not None
        over.set()
        sign = 1 if found.si_code == os.CLD_EXITED else -1
        with contextlib.suppress(OSError):  # the worker has died
            connection.send(json.dumps(sign * found.si_status).encode())

    with contextlib.suppress(OSError):
        os.setpgid(process, process)  # the worker may send the group a signal at once
        connection.send(json.dumps([os.getpid(), process]).encode())
        threading.Thread(target=tell_end).start()
        connection.recv(1)  # the worker knows the end, or has died
    if not over.is_set():
        os.kill(process, signal.SIGKILL)  # it may have left its group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os._exit(0)


def _places() -> dict[str, str]:
    """Return a file of each imported package or module, by its name."""
    found = {name.partition(".")[0]: module for name, module in sys.modules.items()}
    places = {name: getattr(module, "__file__", None) for name, module in found.items()}
    return {k: v for k, v in places.items() if v and k not in ("__main__", "hvd_keras")}


def _take(order: Mapping[str, Any], given: Sequence[int], made: Mapping[str, str]) -> list[str]:
    """Give a fork what a new process of the worker would have; returns the words to run.

    The imports have `made` variables of the environment.
    """
    prepare(order["keeper"], order["open_files"])
    wanted = order["descriptors"]
    above = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for one in given]
    for descriptor in given:
        os.close(descriptor)
    for number, descriptor in zip(wanted, above, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.sched_setaffinity(0, order["cores"])
    for number in signal.valid_signals() - _OWN_SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in order["ignored"] else usual)
    _show(order["command"], {**order["environment"], **made})
    tempfile.tempdir = None  # as an import may have found it
    for name in {"numpy", "torch"} & sys.modules.keys():  # Python's own differ in each fork
        sys.modules[name].random.seed()
    for name in [name for name in sys.modules if name.partition(".")[0] == "hvd_keras"]:
        del sys.modules[name]  # the package of `__main__.py`
    importlib.invalidate_caches()
    words = _words(order["command"])
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder_of(words))
    sys.orig_argv = order["command"]
    return words


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Take an environment, and show others, such as `sweep` and `ps`, both as those of the process.

    They read the memory in which the kernel has put the first arguments and environment. Raises
    PermissionError if nobody may know where that is.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, middle, place, end = map(int, fields[45:49])
    if not start:
        raise PermissionError
    os.environ.clear()
    os.environ.update(environment)  # in other memory
    names = sorted(environment, key=JOB.__ne__)  # that one first, in case that not all fits
    texts = [f"{name}={environment[name]}" for name in names if name != _FILL]
    for first, last, words in (start, middle, command), (place, end, texts):
        data = b"\0".join(map(os.fsencode, words))[: last - first - 1]
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, data, len(data))


def _import(names: Sequence[str], niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    for name in names:
        importlib.import_module(name)


def main() -> int:
    """Run the server, or a rank in a fork of it; returns the status to exit with."""
    delay, idle, modules = float(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
    listener = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    time.sleep(delay)
    started, before = time.time(), dict(os.environ)
    # In a thread, because a process must not become less nice again.
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + (_NICE if delay else 0)
    imports = threading.Thread(target=_import, args=[modules, niceness])
    imports.start()
    imports.join()
    made = {name: value for name, value in os.environ.items() if value != before.get(name)}
    files = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    # The script may have found others in another way.
    fits = all(place in (None, sys.modules[name].__file__) for name, place in modules.items())
    # A fork could not use an open GPU, and the clean-up has to find it.
    if not fits or any("/dev/nvidia" in path for path in files):
        return 1
    gc.collect()
    gc.freeze()  # so that collections in the forks leave the pages shared
    _show(["hvdrun: has imported", *modules], dict(os.environ))
    connection = _serve(listener, idle, started)
    if connection is None:
        return 0
    try:
        rank = _keep(connection)
    except (OSError, ValueError):  # the worker has died, or there is no room
        os._exit(1)
    run(_take(*rank, made))
    return 0
