"""``horovod.common.basics``: the functions of the job as methods, and the table of process sets."""

from collections.abc import Sequence
from typing import Any

import hvd_keras
from hvd_keras import ops
from hvd_keras.horovod import lifecycle, process_sets
from hvd_keras.runtime import process_sets as own
from hvd_keras.runtime import rank_info


class HorovodBasics:
    """What Horovod's modules ask about the job.

    Args:
        pkg_path, args: not needed: there is one library.
    """

    Average, Sum, Adasum = ops.Average, ops.Sum, ops.Adasum
    Min, Max, Product = ops.Min, ops.Max, ops.Product

    init = staticmethod(lifecycle.init)
    shutdown = staticmethod(hvd_keras.shutdown)
    is_initialized = staticmethod(rank_info.is_initialized)
    rank = staticmethod(rank_info.rank)
    size = staticmethod(rank_info.size)
    local_rank = staticmethod(rank_info.local_rank)
    local_size = staticmethod(rank_info.local_size)
    cross_rank = staticmethod(rank_info.cross_rank)
    cross_size = staticmethod(rank_info.cross_size)
    is_homogeneous = staticmethod(rank_info.is_homogeneous)
    start_timeline = staticmethod(hvd_keras.start_timeline)
    stop_timeline = staticmethod(hvd_keras.stop_timeline)
    mpi_threads_supported = staticmethod(hvd_keras.mpi_threads_supported)
    mpi_enabled = staticmethod(hvd_keras.mpi_enabled)
    mpi_built = staticmethod(hvd_keras.mpi_built)
    gloo_enabled = staticmethod(hvd_keras.gloo_enabled)
    gloo_built = staticmethod(hvd_keras.gloo_built)
    nccl_built = staticmethod(hvd_keras.nccl_built)
    ddl_built = staticmethod(hvd_keras.ddl_built)
    ccl_built = staticmethod(hvd_keras.ccl_built)
    cuda_built = staticmethod(hvd_keras.cuda_built)
    rocm_built = staticmethod(hvd_keras.rocm_built)

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        pass

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        rank_info.rank()  # raises before init()
        return {one.process_set_id: one.ranks for one in own.added()}  # type: ignore[misc]

    def _process_set_rank(self, process_set_id: int) -> int:
        return _added(process_set_id).rank()

    def _process_set_size(self, process_set_id: int) -> int:
        return len(_added(process_set_id).ranks)

    def _comm_process_set_id(self, comm: Any) -> int:
        ranks = process_sets.ProcessSet(comm).ranks
        for one in own.added():
            if one.ranks == ranks:
                return one.process_set_id  # type: ignore[return-value]
        raise ValueError(f"got a communicator of ranks {ranks}, expected one of a process set.")

    def _add_process_set_impl(self, ranks: Sequence[int]) -> int | None:
        if sorted(ranks) in (one.ranks for one in own.added()):
            return None
        return process_sets.add_process_set(ranks).process_set_id

    def _remove_process_set_impl(self, process_set_id: int) -> int | None:
        if process_set_id == 0 or process_set_id not in self._get_process_set_ids_and_ranks():
            return None
        own.remove_process_set(_added(process_set_id))
        return process_set_id


def _added(process_set_id: int) -> own.ProcessSet:
    """The process set with this number.

    Raises:
        ValueError: there is none.
    """
    numbers = {one.process_set_id: one for one in own.added()}
    if process_set_id not in numbers:
        raise ValueError(
            f"got process set {process_set_id}, expected one that was added: {[*numbers]}."
        )
    return numbers[process_set_id]


_basics = HorovodBasics()
