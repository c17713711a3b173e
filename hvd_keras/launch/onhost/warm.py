"""Restarts ranks without their imports: a process of each host has done them, and forks.

Each rank tells what it has imported by `hvd.init()`. With the first such word on a host, a worker
starts the server there, which imports the same while the job runs. After a restart, the workers ask
it for their ranks' processes: forks with the files, cores and environment of a worker, in which the
script runs from its first line, as in a new Python.
"""

import builtins
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from . import divide_python, program
from .channel import in_folder
from .limits import SERVER_ANSWER, SERVER_DELAY, SERVER_IDLE
from .process import JOB, prepare

_NICE = 10  # of the imports, beside ranks that train
_HERE = Path(__file__).parent
_FILES = 100  # that come with it at most
_STATUS = struct.Struct("i")  # how a process has ended, as in Popen.returncode
_PIDS = struct.Struct("ii")  # a keeper and its rank
_PEER = struct.Struct("iII")  # its process, user and group
_TOLD = "told"  # the file for what a rank has told
_OPTIONS = re.compile("-[uOB]+")  # those of Python that a server can take


def _words(command: Sequence[str]) -> list[str]:
    """Return the script, or ``-m`` and the module, and its arguments; empty for other programs."""
    options, words = divide_python(command[1:])
    fits = words and (words[0] == "-m" or words[0].endswith(".py"))
    return words if fits and all(map(_OPTIONS.fullmatch, options)) else []


def start_server(
    folder: Path, order: Mapping[str, Any], environment: Mapping[str, str], told: Mapping[str, Any]
) -> subprocess.Popen[bytes] | None:
    """Start this host's server, unless it has one or the command starts Python by something else.

    The server waits for the next start when the caller has ended.

    Args:
        folder: where its socket will be; its name ends with the number by which `sweep` finds it.
        order: what `run_job` describes.
        environment: that of a rank when it was started.
        told: by this rank: its ``command``; its ``modules`` with their files; and the ``changes``
            that its script has made in the environment, which libraries may read when they are
            imported.
    """
    command: list[str] = order["command"]
    words = _words(command)
    if not words or told["command"][1:] != list(command[1:]):
        return None
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return None
    options = command[1 : len(command) - len(words)]
    (folder / _TOLD).write_text(json.dumps(told))
    room = "." * len(b" ".join(map(os.fsencode, told["command"])))  # for `_show`
    return subprocess.Popen(
        [command[0], *options, *program("launch.onhost.warm")[3:], str(folder), room],
        cwd=order["directory"],
        env={**environment, JOB: folder.name.rpartition("-")[2]},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it outlives the job's first start
    )


class Child:
    """A process that a keeper has forked, as `subprocess.Popen` shows one."""

    def __init__(self, connection: socket.socket, keeper: int, process: int) -> None:
        self.connection, self._keeper, self.pid = connection, keeper, process
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it has ended; None if it has not."""
        if self.returncode is None:
            try:
                data = self.connection.recv(_STATUS.size)
            except BlockingIOError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._keeper, signal.SIGCONT)  # while it is stopped, it tells nothing
                return None
            # Without its keeper, it is killed.
            self.returncode = _STATUS.unpack(data)[0] if data else -signal.SIGKILL
        return self.returncode


def fork(
    folder: Path, order: Mapping[str, Any], environment: Mapping[str, str], streams: Sequence[int]
) -> Child | None:
    """Have the server start a rank; None if no server answers.

    Args:
        folder: that of `start_server`.
        order: as there.
        environment: that of the rank.
        streams: its standard input, output and error stream.
    """
    # MPICH's ranks talk to mpirun through a descriptor that they inherit.
    there = [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]
    inherited = [n for n in map(int, there) if n > 2 and os.get_inheritable(n)]
    rank = {
        "descriptors": [0, 1, 2, *inherited],
        "environment": dict(environment),
        "cores": list(os.sched_getaffinity(0)),
    }
    data = json.dumps({**order, **rank}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SERVER_ANSWER)
    try:
        with in_folder(folder) as short:
            connection.connect(f"{short}/server")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != os.geteuid():  # after ours, anybody can make such a folder
            raise PermissionError
        socket.send_fds(connection, [_STATUS.pack(len(data))], [*streams, *inherited])
        connection.sendall(data)
        keeper, process = _PIDS.unpack(connection.recv(_PIDS.size))
    except (OSError, struct.error):
        connection.close()
        return None
    connection.setblocking(False)
    return Child(connection, keeper, process)


def _serve(listener: socket.socket) -> socket.socket | None:
    """Fork a keeper for each worker that asks, which returns the connection; None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    idle = 0  # at how many looks in a row nobody has needed the server
    while idle < 2:
        if select.select([listener], [], [], SERVER_IDLE)[0]:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError):  # there is no room for a process
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return connection
            connection.close()
            idle = 0
        elif select.select([sys.stdin], [], [], 0)[0]:  # the first start has ended
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                idle += 1
    return None


def _keep(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a worker's rank and tell how it ends; returns in the rank the order and the files."""
    size, given, _, _ = socket.recv_fds(connection, _STATUS.size, _FILES)
    order = json.loads(connection.makefile("rb").read(_STATUS.unpack(size)[0]))
    order["keeper"] = os.getpid()
    if select.select([connection], [], [], 0)[0]:
        raise TimeoutError  # the worker waits no more
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
            connection.sendall(_STATUS.pack(sign * found.si_status))

    with contextlib.suppress(OSError):
        os.setpgid(process, process)  # the worker may send the group a signal at once
        connection.sendall(_PIDS.pack(os.getpid(), process))
        threading.Thread(target=tell_end).start()
        connection.recv(1)  # the worker knows the end, or has died
    if not over.is_set():
        os.kill(process, signal.SIGKILL)  # it may have left its group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os._exit(0)


def _take(command: Sequence[str], order: Mapping[str, Any], given: Sequence[int]) -> None:
    """Give a fork what a new process of the worker would have."""
    prepare(order["keeper"], order["open_files"])
    wanted = order["descriptors"]
    above = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for one in given]
    for descriptor in given:
        os.close(descriptor)
    for number, descriptor in zip(wanted, above, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.sched_setaffinity(0, order["cores"])
    os.chdir(order["directory"])
    _show(order["environment"][JOB], command)
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # as an import may have found it
    for name in {"numpy", "torch"} & sys.modules.keys():  # Python's own differ in each fork
        sys.modules[name].random.seed()


def _show(job: str, command: Sequence[str]) -> None:
    """Show others, such as `sweep` and `ps`, this job and this command as those of the process.

    They read the memory in which the kernel has put the first environment and the first arguments.
    """
    start, end, place, _ = _memory()
    environment = b"\0" + Path("/proc/self/environ").read_bytes()
    place += environment.index(f"\0{JOB}=".encode()) + len(JOB) + 1
    ctypes.memmove(place, job.encode(), len(job))
    text = b"\0".join(map(os.fsencode, command))
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _memory() -> list[int]:
    """Return where the arguments and the environment begin and end; zeros if nobody may know."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return list(map(int, fields[45:49]))


def folder_of(words: Sequence[str]) -> str:
    """Return what Python puts first into ``sys.path`` for a script, or for ``-m`` and a module."""
    return os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))


def run(words: list[str]) -> None:
    """Run a script, or ``-m`` and a module, with its arguments as Python does."""
    sys.excepthook = functools.partial(_print_error, sys.excepthook)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], {"__builtins__": builtins}, "__main__", alter_sys=True)
        return
    sys.argv = words
    path = os.path.abspath(words[0])
    if pkgutil.get_importer(path) is not None:  # a folder or a zip file, with a __main__.py
        runpy.run_path(path, run_name="__main__")
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = loader = SourceFileLoader("__main__", path)
    vars(main).update(__builtins__=builtins, __cached__=None)
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)


def _print_error(
    hook: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Call this ``sys.excepthook`` with an error from where the script begins."""
    first = step = traceback
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename).parent == _HERE:
            first = step.tb_next
        step = step.tb_next
    hook(kind, error.with_traceback(first), first)


def _import(told: Mapping[str, Any]) -> None:
    """Import what the rank has that told, unless the ranks need the time of the processor."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hvd_keras"]:
        del sys.modules[name]  # the package of `__main__.py`
    for name, value in told["changes"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    for name in told["modules"]:
        importlib.import_module(name)


def main() -> int:
    """Run the server, or a rank in a fork of it; returns the status to exit with."""
    folder = Path(sys.argv[1])
    told = json.loads((folder / _TOLD).read_text())
    command, modules = told["command"], told["modules"]
    words = _words(command)
    time.sleep(SERVER_DELAY)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder_of(words))
    # In a thread, because a process must not become less nice again.
    imports = threading.Thread(target=_import, args=[told])
    imports.start()
    imports.join()
    files = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    # The script may have found others in another way.
    found = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
    # A fork could not use an open GPU, and the clean-up has to find it.
    if found != modules or any("/dev/nvidia" in path for path in files) or not all(_memory()):
        return 1
    gc.collect()
    gc.freeze()  # so that collections in the forks leave the pages shared
    with socket.socket(socket.AF_UNIX) as listener:
        with in_folder(folder) as short:
            listener.bind(f"{short}/server")
        listener.listen(socket.SOMAXCONN)
        connection = _serve(listener)
    if connection is None:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    try:
        rank = _keep(connection)
    except (OSError, struct.error, ValueError):  # the worker has died, or there is no room
        os._exit(1)
    _take(command, *rank)
    sys.orig_argv = command
    run(words)
    return 0
