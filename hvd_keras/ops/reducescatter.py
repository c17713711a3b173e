"""Reducescatter: every rank gets its share of the rows of an allreduce."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.ops.reduction import Compression, Compressor, check_reducible
from hvd_keras.runtime.keras import converted
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import Average, ReduceOp, Sum


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
    """Like ``allreduce``, but each rank gets only its share of the rows.

    Args:
        tensor: a tensor with at least one dimension, of the same dtype and shape on all ranks.
        device_dense, compression, name, process_set, ignore_name_scope, prescale_factor,
            postscale_factor: as in ``allreduce``.
        op: ``hvd.Average`` (default; floating-point tensors only) or ``hvd.Sum``.

    Returns:
        A tensor with ``rows // size`` rows, on the first ``rows % size`` ranks one more.

    Raises:
        NotImplementedError: ``op`` is another reduction.
        TypeError, ValueError, tf.errors.FailedPreconditionError: as in ``allreduce``; a scalar is a
            ValueError, too.
    """
    return grouped_reducescatter(
        *([tensor], device_dense, compression, op, process_set),
        *(prescale_factor, postscale_factor, name, ignore_name_scope),
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
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
    validate.check("reducescatter", process_set)
    tensors = validate.listed("reducescatter", tensors)
    if not tensors:
        return []
    name = validate.name("reducescatter", name, process_set)
    with validate.on_all_ranks("reducescatter", name, process_set):
        validate.check_compression("reducescatter", compression)
        if op not in (Average, Sum):
            raise NotImplementedError(
                f"hvd.reducescatter: op is {op!r}, expected hvd.Average or hvd.Sum. For another "
                "use hvd.allreduce and take this rank's rows of the result."
            )
        checked = [validate.with_rows("reducescatter", tensor) for tensor in tensors]
        for tensor in checked:
            check_reducible("reducescatter", tensor, op, prescale_factor, postscale_factor)
    # Unlike allreduce's, compressed here: the core rounds no reducescatter.
    packed = [converted(compression.compress)(tensor) for tensor in checked]
    with tf.device(device_dense or None):
        reduced = validate.raw.hvd_reducescatter(
            [tensor for tensor, _ in packed],
            tensor_name=name,
            process_set=process_set.id(),
            reduction=op.value,
            prescale_factor=repr(float(prescale_factor)),
            postscale_factor=repr(float(postscale_factor)),
        )
    return [
        converted(compression.decompress)(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]
