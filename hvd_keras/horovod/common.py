"""What ``horovod.common`` and Horovod's other helpers have."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from packaging import version

import hvd_keras
from hvd_keras.ops import ReduceOp
from hvd_keras.ops.reduction import chosen
from hvd_keras.runtime import settings

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
