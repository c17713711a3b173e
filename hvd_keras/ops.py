"""The collectives, eager and in ``tf.function``.

Every rank calls the same ones; the k-th call of one name on each rank belong together. In a
``tf.function`` they run in the order in which they are written. Calls from several Python threads
need names.
"""

import enum
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import _library, runtime
from hvd_keras.compression import Compression, Compressor

_raw = _library.tensorflow_ops()

_DTYPES = {
    tf.bool,
    tf.uint8,
    tf.int8,
    tf.uint16,
    tf.int16,
    tf.uint32,
    tf.int32,
    tf.uint64,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
}


class ReduceOp(enum.Enum):
    """How ``allreduce`` combines the ranks' tensors, element by element."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


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
        op: ``hvd.Average`` (default; floating-point tensors only), ``Sum``, ``Min``, ``Max`` or
            ``Product``.
        prescale_factor: multiplies every rank's tensor first.
        postscale_factor: multiplies the result.
        name: identifies the call on all ranks; needed only if calls run in no fixed order.

    Returns:
        A tensor of the same dtype and shape; ``tf.IndexedSlices`` for such.

    Raises:
        TypeError: the tensor has a dtype that cannot be reduced.
        ValueError: the arguments contradict each other or do not fit the dtype.
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
    name: str | None = None,
) -> list[Any]:
    """``allreduce`` of several tensors as one request: one agreement for all of them.

    Args:
        tensors: tensors of any mixture of dtypes, dense or ``tf.IndexedSlices``.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
            name: as in ``allreduce``.

    Returns:
        The results in the order of ``tensors``.

    Raises:
        As ``allreduce``.
    """
    reduction = _reduction(average, op)
    name = _name("allreduce", name)
    results = [_checked("allreduce", tensor) for tensor in tensors]
    for tensor in results:
        _check_reducible(tensor, reduction, prescale_factor, postscale_factor)
    sparse = [i for i, tensor in enumerate(results) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    if dense:
        packed = [compression.compress(results[i]) for i in dense]
        with tf.device(device_dense or None):
            reduced = _allreduce_dense(
                [tensor for tensor, _ in packed], reduction, prescale_factor, postscale_factor, name
            )
        for i, tensor, (_, context) in zip(dense, reduced, packed, strict=True):
            results[i] = compression.decompress(tensor, context)
    if sparse:
        factor = prescale_factor * postscale_factor
        if reduction is Average:
            factor /= runtime.size()
        slices = [results[i] for i in sparse]
        with tf.device(device_sparse or None):
            gathered = _allreduce_sparse(slices, compression, factor, f"{name}.slices")
        for i, one in zip(sparse, gathered, strict=True):
            results[i] = one
    return results


def allgather(tensor: Any, name: str | None = None) -> tf.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in the order of the ranks.

    Args:
        tensor: a tensor with at least one dimension, of any numeric dtype or bool; the first
            dimension may differ by rank, and be 0.
        name: as in ``allreduce``.

    Returns:
        A tensor of shape ``[sum of the first dimensions, ...]``.

    Raises:
        TypeError: the tensor's dtype cannot travel.
        ValueError: the tensor is a scalar.
        tf.errors.FailedPreconditionError: dtypes, or dimensions after the first, differ; on every
            rank.
        tf.errors.AbortedError: a rank has left the job.
    """
    tensor = tf.convert_to_tensor(_checked("allgather", tensor))
    if tensor.shape.rank == 0:
        raise ValueError(
            "hvd.allgather: got a scalar, expected a tensor with at least one dimension. "
            "Use tf.expand_dims(tensor, 0)."
        )
    return _raw.hvd_allgather([tensor], tensor_name=_name("allgather", name))[0]


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Gives every rank the tensor of one.

    Args:
        tensor: a tensor of any numeric dtype or bool, of the same dtype and shape on all ranks.
        root_rank: the rank whose values all get.
        name: as in ``allreduce``.

    Returns:
        A tensor of the same dtype and shape, with the root's values.

    Raises:
        TypeError: the tensor's dtype cannot travel.
        ValueError: there is no such rank.
        tf.errors.FailedPreconditionError: dtypes, shapes or roots differ; on every rank.
        tf.errors.AbortedError: a rank has left the job.
    """
    return grouped_broadcast([tensor], root_rank, _name("broadcast", name))[0]


def grouped_broadcast(tensors: Sequence[Any], root_rank: int, name: str) -> list[tf.Tensor]:
    """``broadcast`` of several tensors as one request."""
    size = runtime.size()
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise ValueError(
            f"root_rank is {root_rank!r}, expected a rank of this job: 0 to {size - 1}."
        )
    checked = [tf.convert_to_tensor(_checked("broadcast", tensor)) for tensor in tensors]
    return list(_raw.hvd_broadcast(checked, tensor_name=name, root_rank=root_rank))


def _allreduce_dense(
    tensors: list[tf.Tensor], reduction: ReduceOp, prescale: float, postscale: float, name: str
) -> list[tf.Tensor]:
    if reduction in (Average, Sum):
        return list(
            _raw.hvd_allreduce(
                tensors,
                tensor_name=name,
                reduction=reduction.value,
                prescale_factor=repr(float(prescale)),
                postscale_factor=repr(float(postscale)),
            )
        )

    # The others' gradients compare inputs with outputs, so TensorFlow does the scaling, outside.
    def scaled(values: list[tf.Tensor], factor: float) -> list[tf.Tensor]:
        return values if factor == 1.0 else [v * tf.constant(factor, v.dtype) for v in values]

    reduced = _raw.hvd_allreduce(
        scaled(tensors, prescale), tensor_name=name, reduction=reduction.value
    )
    return scaled(list(reduced), postscale)


def _allreduce_sparse(
    slices: list[tf.IndexedSlices], compression: type[Compressor], factor: float, name: str
) -> list[tf.IndexedSlices]:
    parts, contexts = [], []
    for one in slices:
        # Rows that occur twice stay two: Keras's adaptive optimizers square each by itself, so
        # that summing them first would not give what one process gets.
        values, context = compression.compress(one.values)
        parts += [values, one.indices]
        contexts.append(context)
    gathered = _raw.hvd_allgather(parts, tensor_name=name)
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
            f"op is {op!r}, expected hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product."
        )
    return op


def _checked(kind: str, tensor: Any) -> Any:
    runtime.rank()  # says so, if init() was not called
    if not isinstance(tensor, tf.IndexedSlices):
        tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype not in _DTYPES:
        names = ", ".join(sorted(dtype.name for dtype in _DTYPES))
        raise TypeError(
            f"hvd.{kind}: got a tensor of dtype {tensor.dtype.name}, expected one of {names}. "
            "Encode it as one of these first."
        )
    return tensor


def _check_reducible(tensor: Any, op: ReduceOp, prescale: float, postscale: float) -> None:
    dtype = tensor.dtype
    got = f"hvd.allreduce: got a tensor of dtype {dtype.name} with op=hvd.{op.value}"
    if dtype == tf.bool and op not in (Min, Max):
        raise ValueError(f"{got}. Use hvd.Min (logical and) or hvd.Max (logical or), or cast it.")
    if not dtype.is_floating:
        if op is Average:
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


_unnamed: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def _name(kind: str, name: str | None) -> str:
    """An unnamed call in a function is known by its place among those of its kind in there.

    Not by a name of TensorFlow's: those differ between ranks as soon as one has traced more.
    """
    if name is not None:
        return name
    if tf.executing_eagerly():
        return "unnamed"
    counts = _unnamed.setdefault(tf.compat.v1.get_default_graph(), {})
    counts[kind] = counts.get(kind, -1) + 1
    return f"unnamed.{counts[kind]}"


@tf.RegisterGradient("HvdAllreduce")  # type: ignore[untyped-decorator]
def _allreduce_gradient(op: Any, *upstream: Any) -> list[Any]:
    """The loss is the sum over ranks, so every rank's upstream gradient counts."""
    reduction = ReduceOp(op.get_attr("reduction").decode())
    name = op.get_attr("tensor_name").decode() + ".gradient"
    if reduction in (Average, Sum):
        return list(
            _raw.hvd_allreduce(
                upstream,
                tensor_name=name,
                reduction=reduction.value,
                prescale_factor=op.get_attr("prescale_factor"),
                postscale_factor=op.get_attr("postscale_factor"),
            )
        )
    total = _raw.hvd_allreduce(upstream, tensor_name=name, reduction=Sum.value)
    weights = _product_weights if reduction is Product else _extremum_weights
    return [
        gradient * weight
        for gradient, weight in zip(total, weights(op.inputs, op.outputs, name), strict=True)
    ]


def _extremum_weights(inputs: Any, outputs: Any, name: str) -> list[tf.Tensor]:
    """Ranks that tie for the minimum or maximum share its gradient, as in ``tf.reduce_max``."""
    hits = [tf.cast(x == y, x.dtype) for x, y in zip(inputs, outputs, strict=True)]
    ties = _raw.hvd_allreduce(hits, tensor_name=f"{name}.ties", reduction=Sum.value)
    return [hit / tie for hit, tie in zip(hits, ties, strict=True)]


def _product_weights(inputs: Any, outputs: Any, name: str) -> list[tf.Tensor]:
    """The product of the other ranks' values, right where some are 0 too."""
    del outputs
    zeros = [tf.cast(x == 0, x.dtype) for x in inputs]
    nonzero = [tf.where(x == 0, tf.ones_like(x), x) for x in inputs]
    zero_counts = _raw.hvd_allreduce(zeros, tensor_name=f"{name}.zeros", reduction=Sum.value)
    products = _raw.hvd_allreduce(nonzero, tensor_name=f"{name}.nonzero", reduction=Product.value)
    return [
        tf.where(count - zero > 0, tf.zeros_like(x), product / x)
        for zero, count, product, x in zip(zeros, zero_counts, products, nonzero, strict=True)
    ]


@tf.RegisterGradient("HvdAllgather")  # type: ignore[untyped-decorator]
def _allgather_gradient(op: Any, *upstream: Any) -> list[tf.Tensor]:
    name = op.get_attr("tensor_name").decode() + ".gradient"
    total = _raw.hvd_allreduce(upstream, tensor_name=name, reduction=Sum.value)
    rows = tf.stack([tf.shape(x, tf.int64)[0] for x in op.inputs])
    before = _raw.hvd_allgather([rows[tf.newaxis]], tensor_name=f"{name}.rows")[0]
    starts = tf.reduce_sum(before[: runtime.rank()], axis=0)
    return [gradient[starts[i] : starts[i] + rows[i]] for i, gradient in enumerate(total)]


@tf.RegisterGradient("HvdBroadcast")  # type: ignore[untyped-decorator]
def _broadcast_gradient(op: Any, *upstream: Any) -> list[tf.Tensor]:
    name = op.get_attr("tensor_name").decode() + ".gradient"
    total = list(_raw.hvd_allreduce(upstream, tensor_name=name, reduction=Sum.value))
    if runtime.rank() == op.get_attr("root_rank"):
        return total
    return [tf.zeros_like(gradient) for gradient in total]
