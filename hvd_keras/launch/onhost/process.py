"""How a process ends: with its parent, or soon after it was asked to; and its folders."""

import ctypes
import os
import resource
import signal
import socket
import stat
import struct
from pathlib import Path

# Signals that are passed on to the ranks.
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)

# The number of the job in the environment of the command, and of all that it starts, so that they
# can be found and ended.
JOB = "HVDRUN_JOB"

_PEER = struct.Struct("iII")  # the process, user and group at the other end of a Unix socket
_PR_SET_PDEATHSIG = 1
_TGKILL = {"x86_64": 234, "aarch64": 131}  # the numbers of this system call
_libc = ctypes.CDLL(None)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process get a signal when `parent` dies, at once if it is dead."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
    if os.getppid() != parent:  # it died before the option was set
        os.kill(os.getpid(), number)


def prepare(parent: int, open_files: int | None) -> None:
    """Make a new process lead a group, die with its parent, and open so many files at most."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    if open_files is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))


def ask_to_end(process: int, number: int) -> None:
    """Send a process's group a signal, and continue it if it is stopped.

    A stopped process's signal goes to its first thread, the script's: otherwise any thread takes
    it, while the script goes on and leaves the line where it was stopped, before that is noted.
    """
    is_stopped = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    call = _TGKILL.get(os.uname().machine)
    if not is_stopped or call is None or _libc.syscall(call, process, process, number) != 0:
        os.killpg(process, number)
    os.killpg(process, signal.SIGCONT)


def shell_status(status: int) -> int:
    """Return an exit status, as in `subprocess`, as a shell shows it."""
    return status if status >= 0 else 128 - status


def refuse_other_users(connection: socket.socket) -> None:
    """Raise PermissionError if the other end is another user's: anybody can take an address."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    if _PEER.unpack(peer)[1] != os.geteuid():
        raise PermissionError("another user's process has this socket")


def private_folder(path: Path) -> Path:
    """Make a folder, unless it is there. Raises OSError if other users can or could use it."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    mode = found.st_mode
    if not stat.S_ISDIR(mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise PermissionError(
            f"{path} exists and is not private: owner {found.st_uid}, mode "
            f"{stat.filemode(mode)}; expected a folder of user {os.geteuid()} with mode 700"
        )
    return path
