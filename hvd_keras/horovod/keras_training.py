"""``DistributedOptimizer`` as ``horovod.keras`` and ``horovod.tensorflow.keras`` have it."""

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_keras import ops
from hvd_keras.ops.compression import Compression, Compressor
from hvd_keras.process_sets import ProcessSet, global_process_set
from hvd_keras.training import optimizer as distributed


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ops.ReduceOp = ops.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """``hvd_keras.DistributedOptimizer``; the same optimizer on a rank outside of the process set.

    Args:
        optimizer, …: as in ``hvd_keras.DistributedOptimizer``.

    Raises:
        As ``hvd_keras.DistributedOptimizer``.
    """
    if is_outside(process_set):
        return alone(optimizer)
    return distributed.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """``hvd_keras.PartialDistributedOptimizer``, likewise.

    Raises:
        As ``hvd_keras.PartialDistributedOptimizer``.
    """
    if is_outside(process_set_of(kwargs)):
        return alone(optimizer)
    return distributed.PartialDistributedOptimizer(optimizer, *args, **kwargs)


def process_set_of(kwargs: Mapping[str, Any]) -> ProcessSet:
    """The argument ``process_set`` among others."""
    chosen: ProcessSet = kwargs.get("process_set", global_process_set)
    return chosen


def is_outside(process_set: ProcessSet) -> bool:
    """Whether the set has taken effect, and this rank is not in it."""
    return process_set.process_set_id is not None and not process_set.included()


def alone(optimizer: Any) -> Any:
    """The optimizer of a rank whose gradients stay on it."""
    optimizer.register_local_var = lambda variable: None
    return optimizer
