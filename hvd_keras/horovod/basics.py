"""``horovod.common``: ``init``, the basics, process sets with Horovod's numbers, and helpers."""

import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from packaging import version

import hvd_keras
from hvd_keras import lifecycle
from hvd_keras.gradients import missing_calls, model_ranks
from hvd_keras.ops import ReduceOp, without_data
from hvd_keras.runtime import log, rank_info, settings
from hvd_keras.runtime import process_sets as own
from hvd_keras.runtime.reductions import chosen


class ProcessSet(own.ProcessSet):
    """``hvd_keras.ProcessSet``; its number is used again after it was removed.

    What is neither ranks nor a communicator is a ValueError.
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
        """Return the number of the set in hvd_keras."""
        if self._number is None or self not in own.added():
            raise ValueError(f"{self} was not added, or was removed.")
        return self._number

    def size(self) -> int | None:  # type: ignore[override]
        """Return the number of ranks in the set; None if it was not added."""
        return None if self.process_set_id is None else super().size()

    def rank(self) -> int | None:  # type: ignore[override]
        """This process's rank within the set; None if the set was not added."""
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
    """``hvd_keras.add_process_set``."""
    return own.add_process_set(as_process_set(process_set))


def as_process_set(given: Any) -> Any:
    """Return a process set, of what ``ProcessSet`` takes."""
    return given if isinstance(given, own.ProcessSet) else ProcessSet(given)


def remove_process_set(process_set: ProcessSet) -> bool:
    """``hvd_keras.remove_process_set``; False for the set of all ranks, instead of an error."""
    if getattr(process_set, "process_set_id", None) == 0:
        return False
    return own.remove_process_set(process_set)


def _by_number() -> dict[int | None, own.ProcessSet]:
    return {one.process_set_id: one for one in own.added()}


def _number(process_set_id: int) -> int:
    """Return hvd_keras's number of the set that has this one now."""
    found = _by_number().get(process_set_id)
    return process_set_id if found is None else found.id()


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """``hvd_keras.size_op`` of the set that has this number now."""
    return without_data.size_op(_number(process_set_id), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """``hvd_keras.process_set_included_op`` of the set that has this number now."""
    return without_data.process_set_included_op(_number(process_set_id), name)


def init(comm: Any = None, process_sets: Iterable[Any] | str | None = None) -> None:
    """``hvd_keras.init``; rank 0 says once that this is not Horovod."""
    if process_sets is not None and not isinstance(process_sets, str):
        process_sets = [as_process_set(given) for given in process_sets]
    settings.warn_only()  # Horovod trains separate models
    lifecycle.init(comm, process_sets)
    missing_calls.first_steps_are_local = True  # in elastic scripts
    model_ranks.averages_rows = False
    if hasattr(comm, "Get_group"):
        global_process_set.mpi_comm = comm
    if rank_info.rank() == 0:
        _tell()


@functools.cache
def _tell() -> None:
    try:
        hidden = f", instead of the installed horovod {importlib.metadata.version('horovod')}"
    except importlib.metadata.PackageNotFoundError:
        hidden = ""
    log.logger.warning("'horovod' is hvd_keras %s here%s", hvd_keras.__version__, hidden)


class HorovodBasics:
    """What Horovod's modules ask about the job: the functions of hvd_keras, of one library."""

    init = staticmethod(init)

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(hvd_keras, name)

    # Horovod's own tests ask this to see which process sets exist.
    def _get_process_set_ids_and_ranks(self) -> dict[int | None, list[int]]:
        rank_info.rank()  # raises before init()
        return {number: one.ranks for number, one in _by_number().items()}


_basics = HorovodBasics()


class HorovodInternalError(RuntimeError):
    """Horovod's error of a failed collective. hvd_keras ends the process instead."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """Horovod's signal that hosts were added or removed. hvd_keras starts the job again instead."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod's error of a build for another framework. hvd_keras raises RuntimeError instead."""


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raise ImportError unless a framework, such as "horovod.tensorflow", is supported."""
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


def _built(name: str) -> Callable[..., Any]:
    function = getattr(hvd_keras, name)
    return lambda verbose=False: function()


# In ``horovod.common.util`` these have an argument.
mpi_built, gloo_built, nccl_built = map(_built, ("mpi_built", "gloo_built", "nccl_built"))
ddl_built, ccl_built = map(_built, ("ddl_built", "ccl_built"))


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version such as "2.21.0" is not before another."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"got {ver!r} and {target!r}, expected versions such as '2.21.0'.")
    return version.parse(ver) >= version.parse(target)


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation that the two arguments of ``allreduce`` stand for."""
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
