"""All of the Python side's dealings with the environment, in one place.

The core reads its own settings (native/core/base/settings.h) in the same manner.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
from typing import Any

#: As hvd_keras/launch/onhost/worker.py has it, which can import nothing.
SCRIPT_HAS_ENDED = "ended"
ASKED_FOR = "asked-for"

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of this process.

    Attributes:
        bucket_bytes: ``HVD_BUCKET_BYTES``, the bytes of gradients that travel as one request.
            More per request means fewer agreements; less means that a request can start earlier.
        log_level: ``HVD_LOG_LEVEL``: DEBUG, INFO, WARNING or ERROR, for the core as well.
        gpus_by_mpi: ``HVD_GPU_OPERATIONS`` is MPI, so that processes may share a GPU.
        some_gpus_hidden: ``CUDA_VISIBLE_DEVICES`` is set, which shows CUDA some GPUs only.
        strict: ``HVD_STRICT`` is set and not 0: what would be a warning that the ranks train models
            of their own is an error.
        watched: ``HVDRUN_JOB`` is set: a hvdrun of several hosts hears of this process's end.
        arrival: ``HVDRUN_ARRIVAL``, a file by which hvdrun sees that ``hvd.init()`` was called,
            and, by ``SCRIPT_HAS_ENDED`` in it, that the script has ended by itself.
        commits: ``HVD_COMMITS``, the folder in which rank 0 keeps what ``hvd.elastic`` commits.
    """

    bucket_bytes: int = 16 << 20
    log_level: str = "WARNING"
    gpus_by_mpi: bool = False
    some_gpus_hidden: bool = False
    strict: bool = False
    watched: bool = False
    arrival: pathlib.Path | None = None
    commits: pathlib.Path | None = None

    @property
    def log_number(self) -> int:
        """The level as the core knows it."""
        return _LOG_LEVELS.index(self.log_level)


@functools.cache
def read() -> Settings:
    """Reads the environment once.

    Raises:
        ValueError: a variable is set to something that it cannot be.
    """
    chosen: dict[str, Any] = {}
    if text := os.environ.get("HVD_BUCKET_BYTES"):
        if not text.isdecimal() or int(text) == 0:
            raise ValueError(
                f"HVD_BUCKET_BYTES is {text!r}, expected a number of bytes, 1 or more. "
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
    chosen["watched"] = "HVDRUN_JOB" in os.environ
    if text := os.environ.get("HVDRUN_ARRIVAL"):
        chosen["arrival"] = pathlib.Path(text)
    if text := os.environ.get("HVD_COMMITS"):
        chosen["commits"] = pathlib.Path(text)
    return Settings(**chosen)


def note_that_hvd_keras_is_asked_for() -> None:
    """Lets hvdrun expect that this program calls ``hvd.init()``."""
    if arrival := os.environ.get("HVDRUN_ARRIVAL"):
        with contextlib.suppress(OSError):  # hvdrun then takes it for another program
            pathlib.Path(arrival).with_name(ASKED_FOR).touch()


def point_mpi4py_at(mpi_library: str) -> None:
    """Lets a later import of mpi4py take this MPI library, unless the user chose one."""
    os.environ.setdefault("MPI4PY_LIBMPI", os.path.realpath(mpi_library))


def choose_transports(mpi_version: str) -> None:
    """Leaves out transports of Open MPI 5 that are not needed, unless the user chose some.

    The one-sided transport over libfabric sleeps for a second in MPI_Init, looking for networks;
    collectives here do not use it. A process that no launcher has started needs no transport to
    others, and that over shared memory would leave a file in /dev/shm.

    Args:
        mpi_version: the version text of the MPI in use.
    """
    match = re.match(r"Open MPI v(\d+)", mpi_version)
    if match and int(match[1]) >= 5:
        is_alone = not {"PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
        os.environ.setdefault("OMPI_MCA_btl", "self" if is_alone else "^ofi")
