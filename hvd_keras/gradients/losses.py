"""Weights each rank's loss, so that the mean over the ranks is the loss of one process.

Most losses are means over the rows of a batch, and the mean of the ranks' means is that of all
rows. Keras divides a masked loss by the number of valid entries, though, and one with
``reduction="mean_with_sample_weight"`` by the sum of the weights: numbers that differ by rank. The
loss of all ranks is sum(n_r * loss_r) / sum(n_r), so each rank's is multiplied by
N * n_r / sum(n_r). Losses that are summed are multiplied by N.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import agreement, building
from hvd_keras.runtime import log, settings
from hvd_keras.runtime.keras import is_legacy
from hvd_keras.runtime.process_sets import ProcessSet


@dataclasses.dataclass
class Weighing:
    """The losses of a model that several ranks train.

    Attributes:
        process_set: the ranks.
        averages: whether gradients are averaged, not summed.
        calls: how many losses this step has computed.
    """

    process_set: ProcessSet
    averages: bool
    calls: int = 0


_weighing: contextvars.ContextVar[Weighing | None] = contextvars.ContextVar("losses", default=None)


@contextlib.contextmanager
def weighed(model: Any, process_set: ProcessSet, averages: bool) -> Iterator[None]:
    """Weighs the losses of the model's training steps.

    Args:
        model: a ``keras.Model``.
        process_set: the ranks that train it.
        averages: whether their gradients are averaged, not summed.
    """
    train_step = model.train_step

    @functools.wraps(train_step)
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def step(*args: Any, **kwargs: Any) -> Any:
        token = _weighing.set(Weighing(process_set, averages))
        try:
            return train_step(*args, **kwargs)
        finally:
            _weighing.reset(token)

    before = vars(model).get("train_step")
    model.train_step = step
    try:
        yield
    finally:
        del model.train_step
        if before is not None:
            model.train_step = before


def wrap_call(loss_call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``keras.losses.Loss.__call__``, which every loss and every output calls."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        own = _weighing.get()
        if own is None or building.is_building():
            return loss_call(self, y_true, y_pred, sample_weight)
        seen: list[Any] = []
        local = self.call

        def kept(*args: Any, **kwargs: Any) -> Any:
            seen.append(local(*args, **kwargs))
            return seen[0]

        token = _weighing.set(None)  # a loss may compute others
        if not is_legacy:  # whose autograph would not convert what ``kept`` calls
            self.call = kept
        try:
            value = loss_call(self, y_true, y_pred, sample_weight)
        finally:
            vars(self).pop("call", None)
            _weighing.reset(token)
        own.calls += 1
        return _weigh(own, self, value, seen[0] if seen else None, y_pred, sample_weight)

    call.__doc__ = loss_call.__doc__
    wrapped: Callable[..., Any] = call
    return wrapped


def _weigh(
    own: Weighing, loss: Any, value: Any, values: Any, y_pred: Any, sample_weight: Any
) -> Any:
    reduction = getattr(loss, "reduction", None)
    size = tf.cast(own.process_set.size(), value.dtype)
    if reduction in (None, "none") and own.averages:
        # The gradient of a vector is that of its sum; the vector itself is logged.
        return size * value - tf.stop_gradient((size - 1) * value)
    if reduction == "sum":
        return size * value if own.averages else value
    if values is not None and not tuple(values.shape):
        _tell_of_ratio(loss, values)
        return value
    mask = _both(getattr(y_pred, "_keras_mask", None), getattr(values, "_keras_mask", None))
    if reduction != "mean_with_sample_weight":
        sample_weight = None
    if mask is None and sample_weight is None:
        return value
    weights = [tf.cast(w, value.dtype) for w in (mask, sample_weight) if w is not None]
    own_weight = tf.stop_gradient(tf.reduce_sum(functools.reduce(_product, weights)))
    (total,) = ops.reduce_tensors(
        [tf.cast(own_weight, tf.float64)],
        op=ops.Sum,
        name=f"weight of loss {own.calls}, {agreement.common_path(loss.name)}",
        process_set=own.process_set,
    )
    factor = own.process_set.size() * tf.math.divide_no_nan(tf.cast(own_weight, tf.float64), total)
    return value * tf.stop_gradient(tf.cast(factor, value.dtype))


def _both(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return tf.logical_and(tf.cast(one, tf.bool), tf.cast(other, tf.bool))


def _product(one: Any, other: Any) -> Any:
    """As Keras multiplies a mask and weights: one of them may have a last dimension of 1 more."""
    if len(one.shape) == len(other.shape) + 1 and one.shape[-1] == 1:
        one = tf.squeeze(one, -1)
    elif len(other.shape) == len(one.shape) + 1 and other.shape[-1] == 1:
        other = tf.squeeze(other, -1)
    return one * other


def _tell_of_ratio(loss: Any, value: Any) -> None:
    """Tells of a loss of the whole batch that is no mean over its rows, as far as can be seen.

    Raises:
        ValueError: it is such a loss, and ``HVD_STRICT`` is set.
    """
    if not _is_ratio(value):
        return
    name = getattr(loss, "fn", loss)
    name = getattr(name, "__name__", type(name).__name__)
    text = (
        f"the loss {name} divides by a number that depends on the batch, so the mean of the ranks' "
        "losses is not the loss that one process has for all rows. Return one value per row, with "
        "a mask or sample_weight, which hvd_keras weighs; for Dice and Tversky, give axis."
    )
    if settings.read().strict:
        raise ValueError(f"hvd_keras: {text}")
    log.warn_once(text)


def _is_ratio(value: Any) -> bool:
    """Whether a scalar is a quotient of numbers that depend on the batch, not only on its shape."""
    waiting, seen = [value], set()
    while waiting:
        tensor = waiting.pop()
        if not hasattr(tensor, "op") or id(tensor) in seen or tuple(tensor.shape):
            continue
        seen.add(id(tensor))
        inputs = list(tensor.op.inputs)
        if tensor.op.type in ("RealDiv", "Div", "DivNoNan") and _depends(inputs[1]):
            return True
        waiting += inputs
    return False


def _depends(tensor: Any) -> bool:
    """Whether a tensor depends on values, not only on shapes and constants."""
    kind = tensor.op.type
    if kind in ("Const", "Shape", "Size", "Rank", "ReadVariableOp"):
        return False
    return kind in ("Sum", "Placeholder") or any(map(_depends, tensor.op.inputs))
