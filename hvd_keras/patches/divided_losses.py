"""Losses that add up rows, in a step of one's own that divides them itself.

What the step does is seen in the gradient that comes back.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.gradients import missing_calls
from hvd_keras.training import fit_state


def name_of(loss: Any) -> str:
    """Return the name of a loss, which tf_keras may not give it."""
    return loss.name or type(loss).__name__


def of_step(loss: Any, value: Any, y_pred: Any, ranks: int) -> Any:
    """A sum, or the losses of rows, of which a step of one's own makes a mean; tell if it does not.

    The gradient that comes back shows what the step does: it is 1 if that adds up, or has been
    divided by a constant. ``ranks``: how many take the step.
    """
    # A mean of several values of each row may divide by as many as all ranks have rows.
    rows, size = tf.nest.flatten(y_pred)[0], ranks
    ranks = ranks if (value.shape.rank or 0) < 2 else 0
    may_be_rows = functools.partial(fit_state.may_be_number_of_rows, ranks)

    def gradient(upstream: Any) -> Any:
        # Eager code cannot tell a divisor from other factors.
        in_graph = not hasattr(upstream, "numpy")
        found = set(_divisors(upstream, None, 1.0)) if in_graph else set()
        large = [one for one in found if one and one > fit_state.FEW]
        is_sum = None not in found and bool(large) and not any(map(may_be_rows, large))
        known = rows.shape[0] if len(getattr(rows, "shape", ())) > 0 else 1
        is_whole = in_graph and bool(known) and not _is_part(known, size, rows)
        if (is_sum or _is_one(upstream)) and known != 1:
            missing_calls.warn_if_averaged(
                f"the loss {name_of(loss)}, which adds up rows, is used as a sum, and the "
                "ranks' gradients are averaged, so they are smaller than those of one process. "
                "Divide the sum by the number of this rank's rows, not of the global batch's, or "
                "leave reduction out.",
                of_gradient=True,
            )
        elif ranks and is_whole and large == [known * size]:  # in a loop
            missing_calls.warn_if_averaged(
                f"the loss {name_of(loss)}, which adds up rows, is divided by {known * size}, and "
                "the ranks' gradients are averaged. If that is the number of the global batch's "
                f"rows, they are {size} times smaller than those of one process: divide by the "
                f"{known} rows of this rank.",
                of_gradient=True,
            )
        return upstream

    return tf.custom_gradient(lambda value: (tf.identity(value), gradient))(value)


_seen: set[int] = set()  # numbers of rows of predictions, and of what their graphs get


def _is_part(known: int, ranks: int, rows: Any) -> bool:
    """Whether a rank's batch may have as many rows as these ones on all ranks.

    They may be some rows of it, or a last batch; and a row may have a token for each rank.
    """
    every = tf.compat.v1.get_default_graph().get_operations()
    given = [op.outputs[0].shape for op in every if op.type in _DATA]
    _seen.update(shape[0] for shape in (rows.shape, *given) if shape.rank and shape[0])
    return max(_seen, default=0) > known or ranks in np.cumprod(
        [one or 1 for one in rows.shape[1:-1]]
    )


def of_compile(loss: Any, value: Any, y_pred: Any, own: Any) -> Any:
    """A sum of ``compile``, which is times the number of ranks, or the losses of rows.

    If a step of one's own divides it by the number of this rank's rows, so does its gradient: that
    is then a mean, and those of the ranks are averaged. ``own``: the ``losses.Weighing``.
    """
    total = 1.0 if own.parts is None else own.process_set.size() / own.parts
    first: Any = next(iter(tf.nest.flatten(y_pred)), None)
    parts = own.parts_of(first) if own.parts is None else own.parts
    rows = first.shape[0] if getattr(first, "shape", None) else None
    mine = {None, rows, value.shape.num_elements() if value.shape.rank else None}

    def gradient(upstream: Any) -> Any:
        divisors = set(_divisors(upstream, own.model.optimizer, total))
        if divisors & mine:
            if getattr(loss, "reduction", None) == "sum":
                missing_calls.warn_if_averaged(
                    "a train_step or compute_loss divides the loss of compile, a sum, by a number "
                    "of this rank's rows. The logged loss is too large by a factor of the number "
                    "of ranks; the gradients are right.",
                    of_gradient=True,
                )
            return upstream / tf.cast(parts, upstream.dtype)
        if rows is None and (large := [one for one in divisors if one and one > fit_state.FEW]):
            missing_calls.warn_if_averaged(
                "a train_step or compute_loss divides the loss of compile, which adds up rows, by "
                f"{large[0]:g}. If that is the number of this rank's rows, gradients are too "
                "large, by the number of ranks: divide by that of all ranks' rows.",
                of_gradient=True,
            )
        return upstream

    return tf.custom_gradient(lambda value: (tf.identity(value), gradient))(value)


_DIVISIONS = {"RealDiv", "Div", "DivNoNan"}
_SIZES = {"Shape", "ShapeN", "Size"}
_DATA = {"Placeholder", "IteratorGetNext", "OptionalGetValue"}


def _divisors(upstream: Any, optimizer: Any, total: Any) -> Iterator[float | None]:
    """Yield numbers by which a loss was divided, of which this is the gradient.

    None stands for one that a graph computes of this rank's rows. ``total``: by what the sum of all
    losses is weighed.
    """
    if hasattr(upstream, "numpy"):  # perhaps scaled by the optimizer
        largest = float(np.abs(upstream / tf.cast(total, upstream.dtype)).max(initial=0))
        scale = float(optimizer.scale_loss(1.0)) if hasattr(optimizer, "scale_loss") else 1.0
        for number in (one / largest for one in {1.0, scale} if 0 < largest < one):
            is_whole = abs(number - round(number)) < 1e-5 * number
            yield float(round(number)) if is_whole else number
        return
    waiting, seen = [upstream.op], set()
    while waiting:
        op = waiting.pop()
        if op in seen or "gradient_tape/" not in op.name:
            continue
        seen.add(op)
        inputs = list(op.inputs)
        if op.type in _DIVISIONS:
            divisor = inputs.pop()
            value = tf.get_static_value(divisor)
            if value is not None and value.size == 1:
                yield float(value.item())
            elif divisor.shape.num_elements() == 1 and _is_of_rows(divisor.op):
                yield None
        waiting += [tensor.op for tensor in inputs]


def _is_of_rows(op: Any) -> bool:
    """Whether a number is made of this rank's rows, or of how many they are, and not exchanged."""
    waiting, seen, is_of_rows = [op], set(), False
    while waiting:
        op = waiting.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type.startswith("Hvd"):
            return False
        # A static shape is a constant with the name of the operation.
        kind = op.name.rpartition("/")[2].partition("_")[0] if op.type == "Const" else op.type
        is_of_rows |= kind in _SIZES or (
            kind in _DATA and not any(tensor.dtype == tf.resource for tensor in op.outputs)
        )
        waiting += [] if kind in _SIZES else [tensor.op for tensor in op.inputs]
    return is_of_rows


# Operations that pass on what they get.
_PASSING = {
    *("Fill", "BroadcastTo", "Reshape", "Tile", "Identity", "Cast", "Squeeze", "ExpandDims"),
    "Unpack",
}


def _is_one(tensor: Any) -> bool:
    """Whether all elements are known to be 1; in a graph before they are computed."""
    value = tensor.numpy() if hasattr(tensor, "numpy") else tf.get_static_value(tensor)
    if value is not None:
        return bool(np.all(value == 1))
    given = [source for source in tensor.op.inputs if source.dtype.is_floating]
    return tensor.op.type in _PASSING and bool(given) and all(map(_is_one, given))


def is_computed(target: Any) -> bool:
    """Whether a target may be made of several rows: it is computed, and no data in some shape."""
    if not isinstance(target, tf.Tensor) or hasattr(target, "numpy"):
        return False
    op = target.op
    while op.type in _PASSING and op.inputs:
        op = op.inputs[0].op
    return target.dtype.is_floating and op.type not in _DATA
