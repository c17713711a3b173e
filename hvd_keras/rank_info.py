"""This process's rank, and its host's part of the job. Starts and ends nothing."""

import ctypes
from typing import NamedTuple

from hvd_keras import _library, settings

# mpi4py loads the first MPI that it finds. It must be this one, even if it is imported before
# hvd.init().
settings.point_mpi4py_at(_library.mpi_file())


class RankInfo(NamedTuple):
    """What the core reports about this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: int


# A rank that left while others waited for it keeps its engine in the core, which still counts as
# initialised there.
_has_left = False


def mark_left(left: bool) -> None:
    """Records whether this process has left a job that goes on without it."""
    global _has_left
    _has_left = left


def has_left() -> bool:
    """Whether this process has left a job whose other ranks still waited for it."""
    return _has_left


def is_initialized() -> bool:
    """Whether ``hvd.init()`` was called, and ``hvd.shutdown()`` not since then."""
    return bool(_library.core().hvd_initialized()) and not _has_left


def rank() -> int:
    """This process's rank in the job, from 0 to ``size() - 1``."""
    return _read().rank


def size() -> int:
    """The number of processes in the job."""
    return _read().size


def local_rank() -> int:
    """This process's rank among those of its host, from 0 to ``local_size() - 1``."""
    return _read().local_rank


def local_size() -> int:
    """The number of processes of the job on this host."""
    return _read().local_size


def cross_rank() -> int:
    """This process's rank among those with its ``local_rank()``, one on each host."""
    return _read().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process with this ``local_rank()``."""
    return _read().cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return bool(_read().homogeneous)


def _read() -> RankInfo:
    if not is_initialized():
        raise ValueError(
            "hvd_keras is not initialised in this process. Call hvd.init() first, once, at the "
            "top of the script."
        )
    numbers = (ctypes.c_int * len(RankInfo._fields))()
    _library.core().hvd_place(numbers)
    return RankInfo(*numbers)
