"""The collectives that move rows without computing: allgather, broadcast, alltoall."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.ops.allreduce import reduce_tensors
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import Max, Sum


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
    tensors = validate.listed("allgather", tensors)
    if not tensors:
        return []
    name = validate.name("allgather", name, process_set)
    with validate.on_all_ranks("allgather", name, process_set):
        checked = [validate.with_rows("allgather", tensor) for tensor in tensors]
    return list(validate.raw.hvd_allgather(checked, tensor_name=name, process_set=process_set.id()))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Give every rank the root rank's tensor.

    Args:
        tensor: a tensor of any numeric dtype or bool, of the same dtype and shape on all ranks.
        root_rank: the rank of the job whose values all ranks get.
        name, ignore_name_scope, process_set: as in ``allreduce``.

    Returns:
        A tensor of the same dtype and shape, with the root's values.

    Raises:
        TypeError: the tensor's dtype is not supported.
        ValueError: ``root_rank`` or this rank is not in the process set.
        tf.errors.FailedPreconditionError: (on every rank) dtypes, shapes or roots differ.
    """
    del ignore_name_scope
    return grouped_broadcast([tensor], root_rank, name, process_set)[0]


def grouped_broadcast(
    tensors: Sequence[Any],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``broadcast`` of several tensors as one request."""
    validate.check("broadcast", process_set)
    name = validate.name("broadcast", name, process_set)
    with validate.on_all_ranks("broadcast", name, process_set, root=process_set.ranks[0]):
        checked = [tf.convert_to_tensor(validate.checked("broadcast", x)) for x in tensors]
        process_set.check_root(root_rank)
    return list(
        validate.raw.hvd_broadcast(
            checked, tensor_name=name, root_rank=int(root_rank), process_set=process_set.id()
        )
    )


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
            number of rows. Default: the same number for each rank.
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
    with validate.on_all_ranks("alltoall", name, process_set, np.zeros(size, np.int64)):
        tensor = validate.with_rows("alltoall", tensor)
        if splits is None:  # rows that do not divide are an error of the op, on every rank
            rows = tf.fill([size], tf.shape(tensor, tf.int64)[0] // size)
        else:
            rows = tf.convert_to_tensor(splits)
            if not rows.dtype.is_integer:
                raise TypeError(f"hvd.alltoall: splits are {rows.dtype.name}, expected integers.")
            if rows.shape.rank not in (1, None):
                raise ValueError(
                    f"hvd.alltoall: splits have the shape {rows.shape}, expected ({size},): one "
                    "number of rows for each rank."
                )
            rows = tf.cast(rows, tf.int64)
    received, received_splits = validate.raw.hvd_alltoall(
        tensor,
        rows,
        tensor_name=name,
        process_set=process_set.id(),
    )
    return received if splits is None else (received, tf.cast(received_splits, tf.int32))


def allgather_rows(value: Any, name: str, process_set: ProcessSet) -> Any:
    """Return all ranks' rows of the tensors in a structure, with their masks; of scalars the mean.

    Rows are padded to the longest of all ranks.
    """

    def of_all(part: Any, name: str) -> Any:
        part = tf.convert_to_tensor(part)
        if part.shape.rank == 0:
            part = part / tf.cast(process_set.size(), part.dtype)
            return reduce_tensors([part], op=Sum, name=name, process_set=process_set)[0]
        gathered = padded(part, name)
        for also in ("_keras_mask", "_keras_logits"):  # which losses of Keras use
            rows = getattr(part, also, None)
            if rows is not None:
                setattr(gathered, also, padded(rows, name + also))
        return gathered

    def padded(rows: Any, name: str) -> Any:
        if rows.shape.rank > 1 and not validate.is_compiling():
            # A rank may have padded its batch to its own longest row; one process pads all.
            sizes = tf.shape(rows)[1:]
            (most,) = reduce_tensors(
                [sizes], op=Max, name=f"{name} padding", process_set=process_set
            )
            missing = tf.concat([[0], most - sizes], 0)
            ones = [None, *(1 if size == 1 else None for size in rows.shape[1:])]
            rows = tf.pad(rows, tf.stack([tf.zeros_like(missing), missing], 1))
            # Keras pairs predictions with weights by what it knows of their shapes.
            rows = tf.ensure_shape(rows, ones)
        return allgather(rows, name=name, process_set=process_set)

    parts = enumerate(tf.nest.flatten(value))
    return tf.nest.pack_sequence_as(
        value, [part if part is None else of_all(part, f"{name} {i}") for i, part in parts]
    )
