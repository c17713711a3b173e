"""The only module (but for the launcher) that reads or sets environment variables.

The core reads its own settings in native/core/base/settings.h.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import socket
from typing import Any

#: What `tell_hvdrun` marks: the program uses hvd_keras, so it should call `hvd.init()`;
ASKED_FOR = "asked-for"
#: `hvd.init()` was called; has succeeded, perhaps with a ``comm`` of some ranks;
ARRIVED = "arrived"
JOINED = "joined"
CHOSEN = "chosen"
#: this process ends because of another rank; is about to finalize MPI; has done so, after which
#: its exit status is the script's choice.
FOLLOWS = "follows"
LEAVING = "leaving"
ENDED = "ended"

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of this process.

    Attributes:
        bucket_bytes: ``HVD_BUCKET_BYTES``, the bytes of gradients in one request. Larger buckets
            need fewer agreements; smaller buckets can start earlier.
        log_level: ``HVD_LOG_LEVEL``: DEBUG, INFO, WARNING or ERROR, for the core as well.
        gpus_by_mpi: ``HVD_GPU_OPERATIONS`` is MPI, so processes may share a GPU.
        some_gpus_hidden: ``CUDA_VISIBLE_DEVICES`` is set, which hides some GPUs from CUDA.
        strict: ``HVD_STRICT`` is set and not 0: warnings that the ranks train separate models
            become errors.
        verbose_all: ``HVD_VERBOSE_ALL`` is set and not 0: by default all ranks show Keras's
            progress bar, not one.
        watched: ``HVDRUN_JOB`` is set: hvdrun follows this process.
        all_tracebacks: ``HVDRUN_VERBOSE`` is set, or there is no hvdrun: a rank that fails because
            another one has left prints its traceback, too.
        postmortem: ``HVD_POSTMORTEM``, the folder in which each rank keeps what it did last;
            without it, hvdrun's.
        postmortem_is_asked: the user has named that folder.
        stats_directory: ``HVD_STATS_DIRECTORY``, the folder in which each rank writes its
            statistics.
        tells_statistics: ``HVDRUN_STATISTICS`` is set: hvdrun wants them.
        commits: ``HVD_COMMITS``, the folder in which rank 0 keeps what ``hvd.elastic`` commits.
    """

    bucket_bytes: int = 16 << 20
    log_level: str = "WARNING"
    gpus_by_mpi: bool = False
    some_gpus_hidden: bool = False
    strict: bool = False
    verbose_all: bool = False
    watched: bool = False
    all_tracebacks: bool = True
    postmortem: pathlib.Path | None = None
    postmortem_is_asked: bool = False
    stats_directory: pathlib.Path | None = None
    tells_statistics: bool = False
    commits: pathlib.Path | None = None

    @property
    def log_number(self) -> int:
        """The log level as the core numbers it."""
        return _LOG_LEVELS.index(self.log_level)


@functools.cache
def read() -> Settings:
    """Read the environment, once per process.

    Raises:
        ValueError: a variable has an invalid value.
    """
    chosen: dict[str, Any] = {}
    if text := os.environ.get("HVD_BUCKET_BYTES"):
        if not text.isdecimal() or int(text) == 0:
            raise ValueError(
                f"HVD_BUCKET_BYTES is {text!r}, expected a positive number of bytes. "
                "Correct or unset it."
            )
        chosen["bucket_bytes"] = int(text)
    if text := os.environ.get("HVD_LOG_LEVEL"):
        if text.upper() not in _LOG_LEVELS:
            raise ValueError(
                f"HVD_LOG_LEVEL is {text!r}, expected debug, info, warning or error. "
                "Correct or unset it."
            )
        chosen["log_level"] = text.upper()
    chosen["gpus_by_mpi"] = os.environ.get("HVD_GPU_OPERATIONS") == "MPI"
    chosen["some_gpus_hidden"] = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    chosen["strict"] = os.environ.get("HVD_STRICT", "0") not in ("", "0")
    chosen["verbose_all"] = os.environ.get("HVD_VERBOSE_ALL", "0") not in ("", "0")
    chosen["watched"] = "HVDRUN_JOB" in os.environ
    chosen["all_tracebacks"] = "HVDRUN_VERBOSE" in os.environ or not chosen["watched"]
    asked = os.environ.get("HVD_POSTMORTEM")
    chosen["postmortem_is_asked"] = bool(asked)
    if text := asked or os.environ.get("HVDRUN_POSTMORTEM"):
        chosen["postmortem"] = pathlib.Path(text).absolute()
    if text := os.environ.get("HVD_STATS_DIRECTORY"):
        chosen["stats_directory"] = pathlib.Path(text)
    chosen["tells_statistics"] = "HVDRUN_STATISTICS" in os.environ
    if text := os.environ.get("HVD_COMMITS"):
        chosen["commits"] = pathlib.Path(text)
    return Settings(**chosen)


def mpi_library() -> str:
    """``HVD_MPI_LIBRARY``: the full path of the MPI library to use; empty: the first found."""
    return os.environ.get("HVD_MPI_LIBRARY", "")


def mpi4py_library() -> str:
    """``MPI4PY_LIBMPI``: the MPI library that mpi4py is to use; empty: the first that it finds."""
    return os.environ.get("MPI4PY_LIBMPI", "")


def library_path() -> str:
    """``LD_LIBRARY_PATH``: folders of shared libraries."""
    return os.environ.get("LD_LIBRARY_PATH", "")


def user_cache() -> pathlib.Path:
    """Return the folder for what programs of this user keep to save work."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")


# In words, and its variables for the number of processes and for that of this process.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("the mpirun of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def launched() -> tuple[str, str, int]:
    """The launcher that has started this process, and the variable that says how many it started.

    Returns:
        The launcher in words, the variable's name and its value; without one, "", "" and 1.
    """
    for launcher, name, _ in _LAUNCHERS:
        if (text := os.environ.get(name, "")).isdecimal():
            return launcher, name, int(text)
    return "", "", 1


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return launched()[2] > 1 or bool({"PMIX_RANK", "HVDRUN_ARRIVAL"} & os.environ.keys())


def launched_rank() -> int:
    """Return the number that the launcher has given this process; without a launcher 0."""
    _, found, _ = launched()
    return next((int(os.environ.get(rank, 0)) for _, name, rank in _LAUNCHERS if name == found), 0)


_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def set_horovods_ranks() -> None:
    """Set the variables in which horovodrun gives a process its rank, from those of MPI."""
    _, name, size = launched()
    if not name:
        return
    os.environ.setdefault("HOROVOD_RANK", str(launched_rank()))
    os.environ.setdefault("HOROVOD_SIZE", str(size))
    for ours, theirs in (("RANK", _LOCAL_RANKS), ("SIZE", _LOCAL_SIZES)):
        for found in filter(None, map(os.environ.get, theirs)):
            os.environ.setdefault(f"HOROVOD_LOCAL_{ours}", found)


_hvdrun: socket.socket | None = None


def tell_hvdrun(**message: Any) -> None:
    """Tells hvdrun, if it has started this process, something about this rank.

    Does nothing if hvdrun's worker has gone, or takes nothing for a second.

    Args:
        message: ``mark``, one of those above, or ``statistics``, a dict.
    """
    global _hvdrun
    if (path := os.environ.get("HVDRUN_TELL")) is None:
        return
    with contextlib.suppress(OSError):
        if _hvdrun is None:
            ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            ear.settimeout(1.0)
            # The address of a socket has at most 107 characters.
            folder = os.open(os.path.dirname(path), os.O_PATH)
            try:
                ear.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            finally:
                os.close(folder)
            _hvdrun = ear
        _hvdrun.send(json.dumps(message).encode())


def show_gpus(numbers: str) -> None:
    """Lets CUDA see these GPUs alone, in this process and in those that it starts.

    Args:
        numbers: of the GPUs, such as "0,2".
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = numbers


def point_mpi4py_at(mpi_library: str) -> None:
    """Make a later import of mpi4py use this MPI library, unless the user has chosen one.

    Args:
        mpi_library: a path, or empty if there is none.
    """
    if mpi_library:
        os.environ.setdefault("MPI4PY_LIBMPI", os.path.realpath(mpi_library))


def choose_transports(mpi_version: str) -> None:
    """Turn off unneeded transports of Open MPI 5, unless the user has chosen some.

    The one-sided transport over libfabric sleeps for a second in MPI_Init while it looks for
    networks; hvd_keras does not use it. A process that no launcher has started needs no transport,
    and the one over shared memory would leave a file in /dev/shm.

    Args:
        mpi_version: the version text of the MPI in use.
    """
    match = re.match(r"Open MPI v(\d+)", mpi_version)
    if match and int(match[1]) >= 5:
        is_alone = not {"PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
        os.environ.setdefault("OMPI_MCA_btl", "self" if is_alone else "^ofi")
