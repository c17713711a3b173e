"""This process's rank and position in the job, and learning rates for its size. Read-only."""

import ctypes
import math
from typing import NamedTuple

from hvd_keras.runtime import libraries, settings

# mpi4py loads the first MPI library that it finds. It must find the one of hvd_keras, even if it is
# imported before hvd.init().
settings.point_mpi4py_at(libraries.mpi_file())


class RankInfo(NamedTuple):
    """What the core reports about this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: int


#: By rank of the job, its rank of MPI_COMM_WORLD; empty: the job has all of these, in their order.
world_ranks: list[int] = []

#: This process has left the job, but not together with the other ranks. It keeps its engine, so the
#: core still says that it is initialised.
left_alone = False


def from_world(world_rank: int) -> int:
    """Convert a rank of MPI_COMM_WORLD to the rank in the job.

    Raises:
        ValueError: the process is not in the job.
    """
    members = world_ranks or list(range(size()))
    if world_rank not in members:
        raise ValueError(
            f"MPI's rank {world_rank} is not in the job, which consists of MPI's ranks {members} "
            "(the comm of hvd.init). Use a communicator of these."
        )
    return members.index(world_rank)


def is_initialized() -> bool:
    """Whether ``hvd.init()`` was called, and ``hvd.shutdown()`` not since then."""
    return bool(libraries.core().hvd_initialized()) and not left_alone


def rank() -> int:
    """This process's rank in the job, from 0 to ``size() - 1``."""
    return _read().rank


def size() -> int:
    """Return the number of processes in the job."""
    return _read().size


def local_rank() -> int:
    """This process's rank among those of its host, from 0 to ``local_size() - 1``."""
    return _read().local_rank


def local_size() -> int:
    """Return the number of processes of the job on this host."""
    return _read().local_size


def cross_rank() -> int:
    """This process's rank among those with its ``local_rank()``, one on each host."""
    return _read().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this ``local_rank()``."""
    return _read().cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return bool(_read().homogeneous)


def linear_scaling(rate: float) -> float:
    """Return ``rate`` times ``size()``: for SGD with momentum.

    Use it with a warm-up over the first epochs, ``hvd.callbacks.LearningRateWarmupCallback`` (Goyal
    et al., 2017, https://arxiv.org/abs/1706.02677).

    Args:
        rate: the learning rate for one rank's batch.

    Raises:
        ValueError: ``init()`` was not called.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(hvd.linear_scaling(0.01)))
    """
    return rate * size()


def sqrt_scaling(rate: float) -> float:
    """Return ``rate`` times the square root of ``size()``: for Adam and LAMB.

    This keeps the noise of an adaptive step constant (Krizhevsky, 2014,
    https://arxiv.org/abs/1404.5997, for the rule; You et al., 2019,
    https://arxiv.org/abs/1904.00962, for LAMB; Malladi et al., 2022,
    https://arxiv.org/abs/2205.10287, for Adam).

    Args:
        rate: the learning rate for one rank's batch.

    Raises:
        ValueError: ``init()`` was not called.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Lamb(hvd.sqrt_scaling(0.001)))
    """
    return rate * math.sqrt(size())


def _read() -> RankInfo:
    if not is_initialized():
        advice = "Call hvd.init() first, once, at the top of the script."
        if (parent := settings.parent_rank()) is not None:
            advice = (
                f"Rank {parent} has started it, and it has imported the script: put all that uses "
                'hvd_keras, but hvd.init(), below if __name__ == "__main__".'
            )
        raise ValueError(f"hvd_keras is not initialised in this process. {advice}")
    numbers = (ctypes.c_int * len(RankInfo._fields))()
    libraries.core().hvd_rank_info(numbers)
    return RankInfo(*numbers)
