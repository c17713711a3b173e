"""The gradients of the collectives.

Each is the derivative of the sum of the losses of the process set's ranks with respect to this
rank's input (docs/design.md, "Gradients of the collectives").
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from hvd_keras.ops.validate import raw
from hvd_keras.runtime import process_sets, rank_info
from hvd_keras.runtime.reductions import Adasum, Average, Product, ReduceOp, Sum


def _call(op: Any, suffix: str = ".gradient") -> dict[str, Any]:
    """Return the attributes that identify the collective of a gradient."""
    return {
        "tensor_name": op.get_attr("tensor_name").decode() + suffix,
        "process_set": op.get_attr("process_set"),
    }


def _set_of(op: Any) -> process_sets.ProcessSet:
    return process_sets.of_id(op.get_attr("process_set"))


def _of_floats(gradient: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Exchange the gradients of floating-point tensors alone; others, as indices, have none."""

    def of_all(op: Any, *upstream: Any) -> list[Any]:
        places = [i for i, x in enumerate(op.inputs) if x.dtype.is_floating]
        inputs, outputs, gradients = (
            [tensors[i] for i in places] for tensors in (op.inputs, op.outputs, upstream)
        )
        found: list[Any] = [None] * len(upstream)
        if places:
            floats = SimpleNamespace(get_attr=op.get_attr, inputs=inputs, outputs=outputs)
            for place, result in zip(places, gradient(floats, *gradients), strict=True):
                found[place] = result
        return found

    return of_all


@tf.RegisterGradient("HvdAllreduce")  # type: ignore[untyped-decorator]
@_of_floats
def _allreduce(op: Any, *upstream: Any) -> list[Any]:
    reduction = ReduceOp(op.get_attr("reduction").decode())
    if reduction is Adasum:
        raise NotImplementedError("hvd.allreduce with op=hvd.Adasum has no gradient.")
    if reduction in (Average, Sum):
        return list(
            raw.hvd_allreduce(
                upstream,
                reduction=reduction.value,
                prescale_factor=op.get_attr("prescale_factor"),
                postscale_factor=op.get_attr("postscale_factor"),
                wire_dtype=op.get_attr("wire_dtype"),
                **_call(op),
            )
        )
    # Of the minimum, the maximum and the product: the sum of the gradients, times this rank's part.
    total = raw.hvd_allreduce(
        upstream, reduction=Sum.value, wire_dtype=op.get_attr("wire_dtype"), **_call(op)
    )
    weights = _product_weights if reduction is Product else _extremum_weights
    return [gradient * weight for gradient, weight in zip(total, weights(op), strict=True)]


@tf.RegisterGradient("HvdWait")  # type: ignore[untyped-decorator]
def _wait(op: Any, *upstream: Any) -> list[Any]:
    return list(upstream)


def _sent(op: Any) -> list[tf.Tensor]:
    """Return the inputs as they were sent."""
    wire = tf.as_dtype(op.get_attr("wire_dtype").decode())
    wider = [x.dtype.is_floating and x.dtype.size > wire.size for x in op.inputs]
    return [
        tf.cast(tf.cast(x, wire), x.dtype) if rounded else x
        for x, rounded in zip(op.inputs, wider, strict=True)
    ]


def _extremum_weights(op: Any) -> list[tf.Tensor]:
    """Ranks that tie for the minimum or maximum share its gradient, as in ``tf.reduce_max``."""
    hits = [tf.cast(x == y, x.dtype) for x, y in zip(_sent(op), op.outputs, strict=True)]
    ties = raw.hvd_allreduce(hits, reduction=Sum.value, **_call(op, ".gradient.ties"))
    return [hit / tie for hit, tie in zip(hits, ties, strict=True)]


def _product_weights(op: Any) -> list[tf.Tensor]:
    """Return the product of the other ranks' values, also correct if some are 0."""
    sent = _sent(op)
    zeros = [tf.cast(x == 0, x.dtype) for x in sent]
    nonzero = [tf.where(x == 0, tf.ones_like(x), x) for x in sent]
    counts = raw.hvd_allreduce(zeros, reduction=Sum.value, **_call(op, ".gradient.zeros"))
    products = raw.hvd_allreduce(nonzero, reduction=Product.value, **_call(op, ".gradient.nonzero"))
    return [
        tf.where(count - zero > 0, tf.zeros_like(x), product / x)
        for zero, count, product, x in zip(zeros, counts, products, nonzero, strict=True)
    ]


@tf.RegisterGradient("HvdAllgather")  # type: ignore[untyped-decorator]
@_of_floats
def _allgather(op: Any, *upstream: Any) -> list[tf.Tensor]:
    total = raw.hvd_allreduce(upstream, reduction=Sum.value, **_call(op))
    shapes = [tf.shape(x, tf.int64) for x in op.inputs]
    rank = _set_of(op).rank()
    mine = tf.stack([rank, *(shape[0] for shape in shapes)])[tf.newaxis]
    # [ranks, 1 + tensors]: the rows of each rank that has not joined (hvd.join); earlier ones come
    # first.
    rows = raw.hvd_allgather([mine], **_call(op, ".gradient.rows"))[0]
    starts = tf.reduce_sum(tf.where(rows[:, :1] < rank, rows[:, 1:], 0), axis=0)
    # By start and size: XLA needs a size that does not depend on data.
    return [
        tf.slice(gradient, tf.concat([[start], tf.zeros_like(shape[1:])], axis=0), shape)
        for gradient, start, shape in zip(
            total, tf.unstack(starts, len(shapes)), shapes, strict=True
        )
    ]


@tf.RegisterGradient("HvdBroadcast")  # type: ignore[untyped-decorator]
@_of_floats
def _broadcast(op: Any, *upstream: Any) -> list[tf.Tensor]:
    total = list(raw.hvd_allreduce(upstream, reduction=Sum.value, **_call(op)))
    if rank_info.rank() == op.get_attr("root_rank"):
        return total
    # A session would not run an allreduce that nothing here depends on; the root waits for it.
    with tf.control_dependencies(total):
        return [tf.zeros_like(gradient) for gradient in total]


@tf.RegisterGradient("HvdAlltoall")  # type: ignore[untyped-decorator]
def _alltoall(op: Any, upstream: Any, _: Any) -> list[Any]:
    """What came from a rank goes back to it."""
    returned, _ = raw.hvd_alltoall(upstream, op.outputs[1], **_call(op))
    return [returned, None]


@tf.RegisterGradient("HvdReducescatter")  # type: ignore[untyped-decorator]
@_of_floats
def _reducescatter(op: Any, *upstream: Any) -> list[tf.Tensor]:
    factor = float(op.get_attr("prescale_factor")) * float(op.get_attr("postscale_factor"))
    if ReduceOp(op.get_attr("reduction").decode()) is Average:
        factor /= _set_of(op).size()
    # Rank r's rows of all inputs have made its result, so each rank needs all gradients.
    gathered = raw.hvd_allgather(upstream, **_call(op))
    return [gradient * tf.constant(factor, gradient.dtype) for gradient in gathered]
