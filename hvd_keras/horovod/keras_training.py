"""``DistributedOptimizer`` as ``horovod.keras`` and ``horovod.tensorflow.keras`` have it.

One script runs on all ranks there: on a rank outside of the process set they do nothing.
"""

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_keras import ops
from hvd_keras._keras import keras
from hvd_keras.ops.compression import Compression, Compressor
from hvd_keras.process_sets import ProcessSet, global_process_set
from hvd_keras.training import forgotten, together
from hvd_keras.training import optimizer as distributed

_ARGUMENTS = inspect.signature(distributed.DistributedOptimizer)


@functools.wraps(distributed.DistributedOptimizer)
def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
    given = _ARGUMENTS.bind(optimizer, *args, **kwargs).arguments
    if not is_outside(given.get("process_set", global_process_set)):
        optimizer = distributed.DistributedOptimizer(optimizer, *args, **kwargs)
        if reducer := together.of_optimizer(optimizer):
            reducer.is_horovods = True
        return optimizer
    optimizer.register_local_var = lambda variable: None  # all are local
    forgotten.mark_alone(optimizer)
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ops.ReduceOp = ops.Average,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """``hvd_keras.PartialDistributedOptimizer``.

    Raises:
        As ``hvd_keras.PartialDistributedOptimizer``.
    """
    variables = distributed.local_variables(local_layers)
    partial = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        partial.register_local_var(variable)
    return partial


def is_outside(process_set: ProcessSet) -> bool:
    """Whether the set has taken effect, and this rank is not in it."""
    return process_set.process_set_id is not None and not process_set.included()
