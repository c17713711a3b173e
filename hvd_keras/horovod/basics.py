"""``horovod.common``: ``init``, the basics, process sets with Horovod's numbers, and helpers."""

import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from packaging import version

import hvd_keras
from hvd_keras import lifecycle, ops
from hvd_keras.gradients import missing_calls
from hvd_keras.ops import ReduceOp, without_data
from hvd_keras.ops.reduction import chosen
from hvd_keras.runtime import log, rank_info, settings
from hvd_keras.runtime import process_sets as own


class ProcessSet(own.ProcessSet):
    """``hvd_keras.ProcessSet``; its number is used again after it was removed.

    Args:
        ranks_or_comm: as in ``hvd_keras.ProcessSet``.

    Raises:
        ValueError: as ``hvd_keras.ProcessSet``, and for what is neither ranks nor a communicator.
    """

    _number: int | None = None  # that of hvd_keras, which graphs may hold
    _horovod_number: int | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        try:
            super().__init__(ranks_or_comm)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @property
    def process_set_id(self) -> int | None:
        """The lowest number that no other set had when this one was added; None if it is not."""
        return self._horovod_number

    @process_set_id.setter
    def process_set_id(self, number: int | None) -> None:
        taken = {process_set.process_set_id for process_set in own.added()}
        free = next(i for i in itertools.count(1) if i not in taken)
        self._number, self._horovod_number = number, None if number is None else free

    def id(self) -> int:
        """Return the number of the set in hvd_keras.

        Raises:
            ValueError: the set was not added, or was removed.
        """
        if self._number is None or self not in own.added():
            raise ValueError(f"{self} was not added, or was removed.")
        return self._number

    def size(self) -> int | None:  # type: ignore[override]
        """Return the number of ranks in the set; None if it was not added."""
        return None if self.process_set_id is None else super().size()

    def included(self) -> bool | None:  # type: ignore[override]
        """Whether this process is in the set; None if it was not added."""
        return None if self.process_set_id is None else super().included()

    def rank(self) -> int | None:  # type: ignore[override]
        """This process's rank within the set; None if the set was not added.

        Raises:
            ValueError: this process is not in the set.
        """
        return None if self.process_set_id is None else super().rank()

    def __repr__(self) -> str:
        known = self._ranks is not None or rank_info.is_initialized()
        ranks = self.ranks if known else None
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


class _AllRanks(ProcessSet):
    process_set_id = 0

    def __init__(self) -> None:
        self.mpi_comm = self._ranks = self._world_ranks = None

    def id(self) -> int:
        return 0


global_process_set: ProcessSet = _AllRanks()


def add_process_set(process_set: Any) -> own.ProcessSet:
    """``hvd_keras.add_process_set``.

    Raises:
        As ``hvd_keras.add_process_set``.
    """
    return own.add_process_set(as_process_set(process_set))


def as_process_set(given: Any) -> Any:
    """Return a process set, of what ``ProcessSet`` takes."""
    return given if isinstance(given, own.ProcessSet) else ProcessSet(given)


def remove_process_set(process_set: ProcessSet) -> bool:
    """``hvd_keras.remove_process_set``; of the set of all ranks False, not an error.

    Args:
        process_set: one that was added.

    Returns:
        Whether there was such a set, and it was removed.

    Raises:
        ValueError: the ranks name different sets; on every rank.
    """
    if process_set.process_set_id == 0:
        return False
    return own.remove_process_set(process_set)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """``hvd_keras.size_op`` of the set that has this number now.

    Raises:
        As ``hvd_keras.size_op``.
    """
    return without_data.size_op(_number(process_set_id), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """``hvd_keras.process_set_included_op`` of the set that has this number now.

    Raises:
        As ``hvd_keras.process_set_included_op``.
    """
    return without_data.process_set_included_op(_number(process_set_id), name)


def _number(process_set_id: int) -> int:
    for process_set in own.added():
        if process_set.process_set_id == process_set_id:
            return process_set.id()
    return process_set_id


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
        process_sets = [as_process_set(given) for given in process_sets]
    lifecycle.init(comm, process_sets)
    missing_calls.allow_a_first_step()
    if hasattr(comm, "Get_group"):
        global_process_set.mpi_comm = comm
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
        ranks = ProcessSet(comm).ranks
        for one in own.added():
            if one.ranks == ranks:
                return one.process_set_id  # type: ignore[return-value]
        raise ValueError(f"got a communicator of ranks {ranks}, expected one of a process set.")

    def _add_process_set_impl(self, ranks: Sequence[int]) -> int | None:
        if sorted(ranks) in (one.ranks for one in own.added()):
            return None
        return add_process_set(ranks).process_set_id

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


_Result = TypeVar("_Result")


class HorovodInternalError(RuntimeError):
    """Horovod's error of a failed collective. hvd_keras ends the process instead."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """Horovod's signal that hosts were added or removed. hvd_keras starts the job again instead.

    Args:
        skip_sync: whether the state needs no broadcast.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod's error of a build for another framework. hvd_keras raises RuntimeError instead."""


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raise ImportError unless a framework is supported.

    Args:
        ext_name: such as "horovod.tensorflow".
        ext_env_var, pkg_path, args: not needed.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(
            f"{ext_name} is not available: hvd_keras has horovod.tensorflow and .keras."
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("tensorflow", "keras", "torch", …) is supported."""
    return ext_base_name in ("tensorflow", "keras")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether TensorFlow sees GPUs here."""
    return extension_available(ext_base_name) and bool(tf.config.list_physical_devices("GPU"))


def sycl_built() -> bool:
    """Whether Intel's GPUs are supported: no."""
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Split a list into parts whose lengths differ by at most 1; the first ones are longer."""
    least, longer = divmod(len(items), parts)
    ends = [least * i + min(i, longer) for i in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def _question(function: Callable[[], _Result]) -> Callable[..., _Result]:
    """Return a function about the build, as ``horovod.common.util`` has it: with an argument."""

    @functools.wraps(function)
    def ask(verbose: bool = False) -> _Result:
        return function()

    return ask


mpi_built = _question(hvd_keras.mpi_built)
gloo_built = _question(hvd_keras.gloo_built)
nccl_built = _question(hvd_keras.nccl_built)
ddl_built = _question(hvd_keras.ddl_built)
ccl_built = _question(hvd_keras.ccl_built)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version such as "2.21.0" is not before another.

    Raises:
        ValueError: one of them is no text.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"got {ver!r} and {target!r}, expected versions such as '2.21.0'.")
    return version.parse(ver) >= version.parse(target)


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation that the two arguments of ``allreduce`` stand for.

    Raises:
        ValueError: both are given.
    """
    return chosen(average, op)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank and the size that the launcher has given this process, before ``init``."""
    return settings.launched_rank(), settings.launched()[2]


def vars_to_refs(variables: Any) -> Any:
    """References of variables, which are hashable; of lists of them tuples."""
    if isinstance(variables, list):
        return tuple(map(vars_to_refs, variables))
    return variables.ref()


def refs_to_vars(references: Any) -> Any:
    """Undoes ``vars_to_refs``."""
    if isinstance(references, tuple):
        return list(map(refs_to_vars, references))
    return references.deref()


NoneCompressor = hvd_keras.Compression.none
FP16Compressor = hvd_keras.Compression.fp16
_executing_eagerly = tf.executing_eagerly
_has_eager = True
_make_subgraph = tf.function
_cache = functools.cache
_LegacyOptimizer = tf.compat.v1.train.Optimizer
