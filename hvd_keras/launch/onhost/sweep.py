"""Clean-up script, piped to Python on each host: kills leftover processes, deletes leftover files.

Arguments: seconds between the request to end and the kill, and the jobs' numbers. What belongs to a
job has its number in the environment. The script prints one line: a mark, and the processes that
could not be killed.
"""

import contextlib
import glob
import os
import re
import shutil
import signal
import sys
import tempfile
import time

MARK = "hvdrun-sweep:"

# The mark of what another program than hvdrun has started, and will end by `sweep`.
OWNER = "HVDRUN_OWNER"

# The names that the libraries of MPI, UCX, PSM, NCCL and hvd_keras give their files in /dev/shm.
# All other files there are the user's, also those that a rank has mapped.
NAMES = (
    *("mpich_shm_", "Intel_MPI_", "sm_segment", "vader_segment", "osc_", "pmix", "prte", "ompi"),
    *("ucx_shm_", "psm2_shm", "psm3_shm", "nccl-", "hvd_keras-"),
)

# Seconds that a killed process may take to disappear.
GONE = 5.0

STEP = 0.05


def processes(jobs: "list[str]") -> "list[int]":
    """Return the jobs' processes of this user, except this one and zombies."""
    marks = {f"{name}={job}".encode() for name in ("HVDRUN_JOB", OWNER) for job in jobs}
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if marks & set(environment):
            found.append(int(entry))
    return found


def shared_memory(pids: "list[int]") -> "set[str]":
    """Return the files of MPI and the like in /dev/shm that these processes use."""
    name = re.compile(rf"/dev/shm/(?:{'|'.join(NAMES)})\S*$", re.MULTILINE)
    found = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                found |= set(name.findall(file.read()))
        except OSError:
            continue
    return found


def end(jobs: "list[str]", grace: float) -> "tuple[set[str], list[int]]":
    """Kill the jobs' processes; returns the shared-memory files they used, and those left."""
    used: set[str] = set()
    asked: set[int] = set()
    start = time.monotonic()
    while left := processes(jobs):
        used |= shared_memory(left)
        kill = time.monotonic() >= start + grace
        if time.monotonic() >= start + grace + GONE:  # stuck in the kernel, on a disk perhaps
            break
        for pid in left:
            if kill or pid not in asked:
                asked.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue
        time.sleep(STEP)
    return used, left


def abandoned() -> "set[str]":
    """Return what killed ranks of MPICH have left, whose names tell no job."""
    found = set()
    for path in glob.glob("/dev/shm/mpich_shm_*"):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_mtime < time.time() - 1.0:  # else it may be about to be used
                found.add(path)
    return found


def sweep(jobs: "list[str]", grace: float) -> "list[int]":
    """Kill the jobs' processes and delete their files; returns the processes that are left."""
    used, left = end(jobs, grace)
    used |= abandoned()
    # Of these files, those that are this user's and that no process uses.
    everybody = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if used else []
    for path in used - shared_memory(everybody):
        with contextlib.suppress(FileNotFoundError):  # another sweep was faster
            if os.stat(path).st_uid == os.getuid():
                os.unlink(path)
    for folder in {tempfile.gettempdir(), "/tmp", "/dev/shm"}:
        for job in jobs:
            path = os.path.join(folder, f"hvdrun-{job}")
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
    return left


if __name__ == "__main__":
    print(MARK, *sweep(sys.argv[2:], float(sys.argv[1])))
