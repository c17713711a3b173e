"""The collectives, eager and in ``tf.function``.

Every rank of the process set calls the same ones; the k-th call of one name on each rank belong
together. In a ``tf.function`` they run in the order in which they are written. Calls from several
Python threads need names.

All raise ``tf.errors.AbortedError`` if a rank has left the job, and
``tf.errors.DeadlineExceededError`` if a rank has not come for ``HVD_TIMEOUT_SECONDS``.
"""

import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import calls
from hvd_keras.compression import Compression, Compressor, wire_dtype
from hvd_keras.process_sets import ProcessSet, global_process_set


class ReduceOp(enum.Enum):
    """How ``allreduce`` combines the ranks' tensors, element by element."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    ADASUM = "Adasum"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


_reductions = 0


def reductions() -> int:
    """How many calls of ``allreduce`` and ``grouped_allreduce`` this process's code has made."""
    return _reductions


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combines a tensor over all ranks; all get the result, bit for bit the same.

    Terms are combined in the order of the ranks; float16 and bfloat16 are accumulated in float32.

    Args:
        tensor: a tensor of any numeric dtype (bool with Min and Max), of the same dtype and shape
            on all ranks; or ``tf.IndexedSlices``, which are gathered (Average and Sum only), with
            any number of slices per rank.
        average: Horovod's older way to say ``op``: True is Average, False is Sum.
        device_dense: the TensorFlow device on which a dense tensor is exchanged; default: its own.
        device_sparse: the same for ``tf.IndexedSlices``.
        compression: how the tensor travels: ``hvd.Compression.none``, ``.fp16`` or ``.bf16``.
        op: ``hvd.Average`` (default; floating-point tensors only), ``Sum``, ``Min``, ``Max``,
            ``Product``, or ``Adasum`` (floating-point tensors only; Maleki et al., 2020,
            https://arxiv.org/abs/2006.02924), which adds vectors that are orthogonal and averages
            those that are parallel, pair by pair of neighbouring ranks; it has no gradient.
        prescale_factor: multiplies every rank's tensor first.
        postscale_factor: multiplies the result.
        name: identifies the call on all ranks; needed only if calls run in no fixed order.
        process_set: the ranks that take part; all of them call it.
        ignore_name_scope: Horovod's; names do not depend on TensorFlow's name scopes here.

    Returns:
        A tensor of the same dtype and shape; ``tf.IndexedSlices`` for such.

    Raises:
        TypeError: the tensor has a dtype that cannot be reduced.
        ValueError: the arguments contradict each other or do not fit the dtype, or this rank is
            not in the process set.
        tf.errors.FailedPreconditionError: the ranks' tensors differ in dtype or shape, or ``op`` or
            the factors differ; on every rank.
        tf.errors.AbortedError: a rank has left the job.
    """
    return grouped_allreduce(
        [tensor],
        average,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
        name=name,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """``allreduce`` of several tensors as one request: one agreement for all of them.

    Args:
        tensors: tensors of any mixture of dtypes, dense or ``tf.IndexedSlices``.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
            process_set, ignore_name_scope, name: as in ``allreduce``.

    Returns:
        The results in the order of ``tensors``.

    Raises:
        As ``allreduce``.
    """
    del ignore_name_scope
    global _reductions
    _reductions += 1
    reduction = _reduction(average, op)
    name = calls.name("allreduce", name, process_set)
    results = [calls.checked("allreduce", tensor, process_set) for tensor in tensors]
    for tensor in results:
        check_reducible("allreduce", tensor, reduction, prescale_factor, postscale_factor)
    sparse = [i for i, tensor in enumerate(results) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    if dense:
        wire = wire_dtype(compression)
        # The core rounds while it packs; but Adasum's vectors, and what may be on a GPU, before.
        if compression is not Compression.none and (
            reduction is Adasum or tf.config.get_visible_devices("GPU")
        ):
            wire = None
        outside = compression if wire is None else Compression.none
        packed = [outside.compress(results[i]) for i in dense]
        with tf.device(device_dense or None):
            reduced = _allreduce_dense(
                [tensor for tensor, _ in packed],
                reduction,
                prescale_factor,
                postscale_factor,
                tensor_name=name,
                process_set=process_set.id(),
                wire_dtype=(wire or tf.float64).name,
            )
        for i, tensor, (_, context) in zip(dense, reduced, packed, strict=True):
            results[i] = outside.decompress(tensor, context)
    if sparse:
        factor = prescale_factor * postscale_factor
        if reduction is Average:
            factor /= process_set.size()
        slices = [results[i] for i in sparse]
        with tf.device(device_sparse or None):
            gathered = _allreduce_sparse(
                slices,
                compression,
                reduction,
                factor,
                tensor_name=f"{name}.slices",
                process_set=process_set.id(),
            )
        for i, one in zip(sparse, gathered, strict=True):
            results[i] = one
    return results


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
        TypeError: the tensor's dtype cannot travel.
        ValueError: the tensor is a scalar, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: dtypes, or dimensions after the first, differ; on every
            rank.
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
    checked = [calls.with_rows("allgather", tensor, process_set) for tensor in tensors]
    if not checked:
        return []
    name = calls.name("allgather", name, process_set)
    return list(calls.raw.hvd_allgather(checked, tensor_name=name, process_set=process_set.id()))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Gives every rank the tensor of one.

    Args:
        tensor: a tensor of any numeric dtype or bool, of the same dtype and shape on all ranks.
        root_rank: the rank, of the job, whose values all get.
        name, ignore_name_scope, process_set: as in ``allreduce``.

    Returns:
        A tensor of the same dtype and shape, with the root's values.

    Raises:
        TypeError: the tensor's dtype cannot travel.
        ValueError: there is no such rank, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: dtypes, shapes or roots differ; on every rank.
    """
    del ignore_name_scope
    return grouped_broadcast(
        [tensor], root_rank, calls.name("broadcast", name, process_set), process_set
    )[0]


def grouped_broadcast(
    tensors: Sequence[Any],
    root_rank: int,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``broadcast`` of several tensors as one request."""
    checked = [tf.convert_to_tensor(calls.checked("broadcast", x, process_set)) for x in tensors]
    if not isinstance(root_rank, int) or root_rank not in process_set.ranks:
        raise ValueError(
            f"root_rank is {root_rank!r}, expected one of the ranks that take part: "
            f"{process_set.text()}."
        )
    return list(
        calls.raw.hvd_broadcast(
            checked, tensor_name=name, root_rank=root_rank, process_set=process_set.id()
        )
    )


def _allreduce_dense(
    tensors: list[tf.Tensor],
    reduction: ReduceOp,
    prescale: float,
    postscale: float,
    **call: Any,
) -> list[tf.Tensor]:
    if reduction in (Average, Sum, Adasum):
        return list(
            calls.raw.hvd_allreduce(
                tensors,
                reduction=reduction.value,
                prescale_factor=repr(float(prescale)),
                postscale_factor=repr(float(postscale)),
                **call,
            )
        )

    # The others' gradients compare inputs with outputs, so TensorFlow does the scaling, outside.
    # The ranks' factors are compared nevertheless.
    def scaled(values: list[tf.Tensor], factor: float) -> list[tf.Tensor]:
        return values if factor == 1.0 else [v * tf.constant(factor, v.dtype) for v in values]

    reduced = calls.raw.hvd_allreduce(
        scaled(tensors, prescale),
        reduction=reduction.value,
        note=f"prescale_factor={prescale!r} postscale_factor={postscale!r}",
        **call,
    )
    return scaled(list(reduced), postscale)


def _allreduce_sparse(
    slices: list[tf.IndexedSlices],
    compression: type[Compressor],
    reduction: ReduceOp,
    factor: float,
    **call: Any,
) -> list[tf.IndexedSlices]:
    parts, contexts = [], []
    for one in slices:
        # Rows that occur twice stay two: Keras's adaptive optimizers square each by itself, so
        # that summing them first would not give what one process gets.
        values, context = compression.compress(one.values)
        parts += [values, one.indices]
        contexts.append(context)
    gathered = calls.raw.hvd_allgather(parts, note=f"{reduction.value} factor={factor!r}", **call)
    results = []
    for i, one in enumerate(slices):
        values = compression.decompress(gathered[2 * i], contexts[i])
        if factor != 1.0:
            values *= tf.constant(factor, values.dtype)
        results.append(tf.IndexedSlices(values, gathered[2 * i + 1], one.dense_shape))
    return results


def _reduction(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise ValueError(f"got both average={average} and op={op}. Give op alone.")
    if average is not None:
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise ValueError(
            f"op is {op!r}, expected hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product or "
            "hvd.Adasum."
        )
    return op


def check_reducible(
    kind: str, tensor: Any, op: ReduceOp, prescale: float, postscale: float
) -> None:
    """Raises ValueError if tensors of this dtype cannot be reduced so."""
    dtype = tensor.dtype
    got = f"hvd.{kind}: got a tensor of dtype {dtype.name} with op=hvd.{op.value}"
    if dtype == tf.bool and op not in (Min, Max):
        raise ValueError(f"{got}. Use hvd.Min (logical and) or hvd.Max (logical or), or cast it.")
    if not dtype.is_floating:
        if op in (Average, Adasum):
            raise ValueError(
                f"{got}, which would have to round. Use op=hvd.Sum and divide by hvd.size(), or "
                "cast it to float32."
            )
        if prescale != 1.0 or postscale != 1.0:
            raise ValueError(
                f"{got} and prescale_factor={prescale}, postscale_factor={postscale}, which would "
                "have to round. Cast it to float32."
            )
    if isinstance(tensor, tf.IndexedSlices) and op not in (Average, Sum):
        raise ValueError(
            f"{got} as tf.IndexedSlices, expected hvd.Average or hvd.Sum. "
            "Use tf.convert_to_tensor first."
        )
