"""Alltoall: every rank sends different rows to each rank."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the tensor to each rank, and get a part from each.

    Args:
        tensor: a tensor with at least one dimension, of any numeric dtype or bool; the first
            dimension may differ by rank.
        splits: the number of rows for each rank: integers of shape ``[size]`` that add up to the
            number of rows. Default: equally many for each rank.
        name, ignore_name_scope, process_set: as in ``allreduce``.

    Returns:
        The received rows, in the order of the ranks. With ``splits``, a pair of these rows and the
        number of rows from each rank (int32 of shape ``[size]``).

    Raises:
        TypeError: the tensor's dtype is not supported.
        ValueError: the tensor is a scalar, or this rank is not in the process set.
        tf.errors.InvalidArgumentError: (on every rank) a rank's splits do not fit its tensor.
        tf.errors.FailedPreconditionError: (on every rank) dtypes, or dimensions after the first,
            differ between ranks, or a rank has joined.
    """
    del ignore_name_scope
    validate.check("alltoall", process_set)
    name = validate.name("alltoall", name, process_set)
    size = process_set.size()
    empty = {"tensor": validate.EMPTY, "splits": np.zeros(size, np.int64)}
    with validate.on_all_ranks("alltoall", name, process_set, **empty):
        tensor = validate.with_rows("alltoall", tensor)
        if splits is None:
            rows = tf.fill([size], tf.shape(tensor, tf.int64)[0] // size)
        else:
            rows = tf.cast(tf.convert_to_tensor(splits), tf.int64)
    received, received_splits = validate.raw.hvd_alltoall(
        tensor,
        rows,
        tensor_name=name,
        process_set=process_set.id(),
    )
    return received if splits is None else (received, tf.cast(received_splits, tf.int32))
