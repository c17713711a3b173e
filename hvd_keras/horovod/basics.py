"""``init``, and ``horovod.common.basics``: the job's functions as methods, and process sets."""

import functools
import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import hvd_keras
from hvd_keras import lifecycle, ops
from hvd_keras.gradients import missing_calls
from hvd_keras.horovod import process_sets as horovods
from hvd_keras.runtime import log, rank_info
from hvd_keras.runtime import process_sets as own

# What the job's functions are called in hvd_keras, too.
_SAME = (
    "shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous "
    "start_timeline stop_timeline mpi_threads_supported mpi_enabled mpi_built gloo_enabled "
    "gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built"
)


def init(comm: Any = None, process_sets: Iterable[Any] | str | None = None) -> None:
    """``hvd_keras.init``; rank 0 says once whom the program has met.

    Args:
        comm, process_sets: as in ``hvd_keras.init``.

    Raises:
        As ``hvd_keras.init``.
    """
    if process_sets is not None and not isinstance(process_sets, str):
        process_sets = [horovods.as_process_set(given) for given in process_sets]
    lifecycle.init(comm, process_sets)
    missing_calls.allow_a_first_step()
    if hasattr(comm, "Get_group"):
        horovods.global_process_set.mpi_comm = comm
    if rank_info.rank() == 0:
        _tell()


@functools.cache
def _tell() -> None:
    try:
        hidden = f", in place of the installed horovod {importlib.metadata.version('horovod')}"
    except importlib.metadata.PackageNotFoundError:
        hidden = ""
    log.logger.warning("'horovod' is hvd_keras %s here%s", hvd_keras.__version__, hidden)


class HorovodBasics:
    """What Horovod's modules ask about the job.

    Args:
        pkg_path, args: not needed: there is one library.
    """

    Average, Sum, Adasum = ops.Average, ops.Sum, ops.Adasum
    Min, Max, Product = ops.Min, ops.Max, ops.Product

    init = staticmethod(init)

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
        ranks = horovods.ProcessSet(comm).ranks
        for one in own.added():
            if one.ranks == ranks:
                return one.process_set_id  # type: ignore[return-value]
        raise ValueError(f"got a communicator of ranks {ranks}, expected one of a process set.")

    def _add_process_set_impl(self, ranks: Sequence[int]) -> int | None:
        if sorted(ranks) in (one.ranks for one in own.added()):
            return None
        return horovods.add_process_set(ranks).process_set_id

    def _remove_process_set_impl(self, process_set_id: int) -> int | None:
        if process_set_id == 0 or process_set_id not in self._get_process_set_ids_and_ranks():
            return None
        own.remove_process_set(_added(process_set_id))
        return process_set_id


def _added(process_set_id: int) -> own.ProcessSet:
    """Return the process set with this number.

    Raises:
        ValueError: there is none.
    """
    numbers = {one.process_set_id: one for one in own.added()}
    if process_set_id not in numbers:
        raise ValueError(
            f"got process set {process_set_id}, expected one that was added: {[*numbers]}."
        )
    return numbers[process_set_id]


for _name in _SAME.split():
    setattr(HorovodBasics, _name, staticmethod(getattr(hvd_keras, _name)))

_basics = HorovodBasics()
