"""The collectives that send different rows to different ranks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import calls
from hvd_keras.compression import Compression, Compressor
from hvd_keras.ops import Average, ReduceOp, Sum, check_reducible
from hvd_keras.process_sets import ProcessSet, global_process_set


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends a part of the tensor to each rank, and gets a part from each.

    Args:
        tensor: a tensor with at least one dimension, of any numeric dtype or bool; the first
            dimension may differ by rank.
        splits: how many rows go to each rank: integers of shape ``[size]`` that add up to the
            number of rows. Default: as many to each.
        name, ignore_name_scope, process_set: as in ``allreduce``.

    Returns:
        The rows received, in the order of the ranks. With ``splits`` a pair: the rows, and how many
        came from each rank (int32 of shape ``[size]``).

    Raises:
        TypeError: the tensor's dtype cannot travel.
        ValueError: the tensor is a scalar, or this rank is not in the process set.
        tf.errors.InvalidArgumentError: a rank's splits do not fit its tensor; on every rank.
        tf.errors.FailedPreconditionError: dtypes, or dimensions after the first, differ, or a rank
            has joined; on every rank.
    """
    del ignore_name_scope
    tensor = calls.with_rows("alltoall", tensor, process_set)
    size = process_set.size()
    if splits is None:
        rows = tf.fill([size], tf.shape(tensor, tf.int64)[0] // size)
    else:
        rows = tf.cast(tf.convert_to_tensor(splits), tf.int64)
    received, received_splits = calls.raw.hvd_alltoall(
        tensor,
        rows,
        tensor_name=calls.name("alltoall", name, process_set),
        process_set=process_set.id(),
    )
    return received if splits is None else (received, tf.cast(received_splits, tf.int32))


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """``allreduce`` of which each rank gets only its share of the rows.

    Args:
        tensor: a tensor with at least one dimension, of the same dtype and shape on all ranks.
        device_dense, compression, name, process_set, ignore_name_scope, prescale_factor,
            postscale_factor: as in ``allreduce``.
        op: ``hvd.Average`` (floating-point tensors only) or ``hvd.Sum``.

    Returns:
        A tensor with ``rows // size`` rows, and one more on the first ``rows % size`` ranks.

    Raises:
        NotImplementedError: ``op`` is another one.
        TypeError, ValueError, tf.errors.FailedPreconditionError: as in ``allreduce``; a scalar is a
            ValueError, too.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        ignore_name_scope,
        prescale_factor,
        postscale_factor,
        name,
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """``reducescatter`` of several tensors as one request.

    Args:
        tensors: tensors of any mixture of dtypes.
        device_dense, compression, op, process_set, ignore_name_scope, prescale_factor,
            postscale_factor, name: as in ``reducescatter``.

    Returns:
        The results in the order of ``tensors``.

    Raises:
        As ``reducescatter``.
    """
    del ignore_name_scope
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"hvd.reducescatter: op is {op!r}, expected hvd.Average or hvd.Sum. For another use "
            "hvd.allreduce and take this rank's rows of the result."
        )
    checked = [calls.with_rows("reducescatter", tensor, process_set) for tensor in tensors]
    for tensor in checked:
        check_reducible("reducescatter", tensor, op, prescale_factor, postscale_factor)
    if not checked:
        return []
    packed = [compression.compress(tensor) for tensor in checked]
    with tf.device(device_dense or None):
        reduced = calls.raw.hvd_reducescatter(
            [tensor for tensor, _ in packed],
            tensor_name=calls.name("reducescatter", name, process_set),
            process_set=process_set.id(),
            reduction=op.value,
            prescale_factor=repr(float(prescale_factor)),
            postscale_factor=repr(float(postscale_factor)),
        )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]
