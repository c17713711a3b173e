"""Runs the command of one rank and records how it ended.

mpirun starts this file by its path in an isolated interpreter, once per rank, so it uses the
standard library only. The command's input and output go through named pipes to hvdrun and not
through mpirun, which joins pieces of lines and mixes its own messages in. How the command ended is
written to a file, because mpirun's exit status can be 0 for a job that was killed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# Those of Open MPI 4 and 5, of PMIx, of MPICH and of Slurm; the surest first.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

# The environment variable by which a rank knows its `arrival_path`.
ARRIVAL = "HVDRUN_ARRIVAL"

# The environment variable that tells how many files the user lets a process open.
FILES = "HVDRUN_OPEN_FILES"

# Seconds from the request to end until the kill: enough to flush and close files.
GRACE = 5.0

# Seconds between two looks whether the parent still lives (see `wait_for_end`).
PARENT_CHECK = 1.0

SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set one of Linux's per-process options."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process get a signal when `parent` dies, at once if it is dead."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the option was set
        os.kill(os.getpid(), number)


def report_path(directory: Path, rank: int) -> Path:
    """The file that tells how a rank ended."""
    return directory / f"rank-{rank}.json"


def arrival_path(directory: Path, rank: int) -> Path:
    """The file that is there once a rank has called `hvd.init()`."""
    return directory / f"rank-{rank}.arrived"


def stream_path(directory: Path, rank: int, stream: str) -> Path:
    """The named pipe that carries a rank's `stream`: "in" (of rank 0 only), "out" or "err"."""
    return directory / f"rank-{rank}.{stream}"


def write_report(directory: Path, rank: int, status: int | None, stopped: bool = False) -> None:
    """Record the state of a rank at this moment.

    `status` is as in `subprocess`: the exit status, or minus the number of the signal, or None
    while the rank runs. `stopped` tells that it was asked to end and did not end by itself.
    """
    path = report_path(directory, rank)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps({"status": status, "time": time.time(), "stopped": stopped}))
    unfinished.replace(path)  # atomic: a reader sees the old report or the new one


def find_rank(environment: Mapping[str, str]) -> int:
    """This process's rank, as mpirun has put it into the environment."""
    for name in RANK_VARIABLES:
        if name in environment:
            return int(environment[name])
    raise SystemExit(
        f"hvdrun: mpirun gave this process no rank: none of {', '.join(RANK_VARIABLES)} is set; "
        "use Open MPI's or MPICH's mpirun (hvdrun --mpirun PATH)"
    )


def open_stream(directory: Path, rank: int, stream: str) -> int:
    """Open the command's end of one of its standard streams."""
    if stream == "in" and rank != 0:
        return os.open(os.devnull, os.O_RDONLY)
    flags = os.O_RDONLY if stream == "in" else os.O_WRONLY
    # Without O_NONBLOCK this would wait for hvdrun for ever if it is gone.
    descriptor = os.open(stream_path(directory, rank, stream), flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def wait_for_end(child: subprocess.Popen[bytes], parent: int, hvdrun: int) -> bool:
    """Wait for the child, passing requests to end on to it; True if there was one while it ran.

    The signals must be blocked. The death of mpirun, which has started this process, is such a
    request too: the parent changes then, to hvdrun, perhaps before `parent` was looked up. It is
    looked up now and then because Linux's death signal comes from the *thread* that started this
    process, and mpirun starts many ranks from helper threads, which end early.
    """
    stopped = False
    kill_time = float("inf")
    while child.poll() is None:
        wait = min(PARENT_CHECK, max(0.0, kill_time - time.monotonic()))
        arrived = signal.sigtimedwait(SIGNALS, wait)
        request = arrived.si_signo if arrived and arrived.si_signo != signal.SIGCHLD else None
        orphan = os.getppid() != parent or parent == hvdrun
        if request is None and orphan and not stopped:
            request = signal.SIGTERM
        # A child that ended before the request reached it ended by itself.
        if request is not None and child.poll() is None:
            if not stopped:
                kill_time = time.monotonic() + GRACE
            stopped = True
            os.killpg(child.pid, request)
        if time.monotonic() >= kill_time and child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            kill_time = float("inf")
    return stopped


def run(directory: Path, hvdrun: int, rank: int, command: Sequence[str]) -> int:
    """Run the command as this rank to its end; returns the status to exit with.

    `hvdrun` is the number of the process that has made `directory`.
    """
    parent, worker = os.getppid(), os.getpid()
    in_, out, err = (open_stream(directory, rank, stream) for stream in ("in", "out", "err"))
    # If ignored, as a parent may have left it, the child's status would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    environment = {name: value for name, value in os.environ.items() if name != FILES}
    environment[ARRIVAL] = str(arrival_path(directory, rank))

    def prepare() -> None:
        # In a group of its own the command gets a signal from here only, and not from mpirun too.
        os.setpgid(0, 0)
        die_with_parent(worker)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if FILES in os.environ:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ[FILES]), hard))

    write_report(directory, rank, None)
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=in_,
            stdout=out,
            stderr=err,
            close_fds=False,  # MPICH talks to its ranks through an inherited descriptor
            preexec_fn=prepare,
        )
    except OSError as error:
        os.write(err, f"hvdrun: cannot start {command[0]!r}: {error.strerror}\n".encode())
        status = 127 if error.errno == errno.ENOENT else 126  # a shell's numbers for the two
        write_report(directory, rank, status)
        return status
    for descriptor in (in_, out, err):  # their ends shall be seen when the command ends
        os.close(descriptor)
    stopped = wait_for_end(child, parent, hvdrun)
    write_report(directory, rank, child.returncode, stopped)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    _, directory_, hvdrun_, command_ = sys.argv
    sys.exit(run(Path(directory_), int(hvdrun_), find_rank(os.environ), json.loads(command_)))
