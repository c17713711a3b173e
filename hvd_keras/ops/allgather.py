"""Allgather: every rank gets the rows of all ranks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in the order of the ranks.

    Args:
        tensor: a tensor with at least one dimension, of any numeric dtype or bool; the first
            dimension may differ by rank, and be 0.
        name, ignore_name_scope, process_set: as in ``allreduce``.

    Returns:
        A tensor of shape ``[sum of the first dimensions, ...]``.

    Raises:
        TypeError: the tensor's dtype is not supported.
        ValueError: the tensor is a scalar, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: (on every rank) dtypes, or dimensions after the first,
            differ between ranks.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``allgather`` of several tensors as one request.

    Args:
        tensors: tensors of any mixture of dtypes.
        name, ignore_name_scope, process_set: as in ``allreduce``.

    Returns:
        The results in the order of ``tensors``.

    Raises:
        As ``allgather``.
    """
    del ignore_name_scope
    validate.check("allgather", process_set)
    if len(tensors) == 0:
        return []
    name = validate.name("allgather", name, process_set)
    with validate.on_all_ranks("allgather", name, process_set):
        checked = [validate.with_rows("allgather", tensor) for tensor in tensors]
    return list(validate.raw.hvd_allgather(checked, tensor_name=name, process_set=process_set.id()))
