"""Compares a model's first step with that of one process, before it is made.

A step that is not Keras's own may compute anything of its batch, such as a sum over the rows, or
comparisons of rows with each other, which the ranks' parts do not add up to. So on the first batch
both steps are made, and what they have changed is put back: that of one process, of all rows, and
the divided one. Gradients and logs must be equal.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.automatic import noise
from hvd_keras.runtime import agree

#: The gradients of variables that the present step computes, if they are to be compared.
gradients: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar(
    "gradients", default=None
)

# Relative to the largest value of a variable's gradient, and of all gradients.
_TOLERANCE, _OF_ALL = 1e-2, 1e-4


def is_known(model: Any, method: str) -> bool:
    """Whether a model's step consists of Keras's own parts, which divide, or cannot be traced."""
    if model.run_eagerly:  # what its first step creates could not be put back
        return True
    own = ("compute_loss", "compute_metrics", method)
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in own):
        return False
    layers = [*model._flatten_layers()]
    nodes = [node for layer in layers for node in getattr(layer, "operations", ())]
    homes = ("keras.src.layers.", "keras.src.models.")
    return all(
        type(part).__module__.startswith(homes)
        and not isinstance(part, keras.layers.Lambda)
        and getattr(part, "activity_regularizer", None) is None  # older Keras sums over the rows
        for part in [*layers, *nodes]
    )


def compare(model: Any, step: Callable[..., Any], divided: Callable[..., Any], data: Any) -> None:
    """Make a step both ways, and put back what they have changed; ValueError if they differ."""

    def of_one(data: Any) -> Any:
        with agree.within(agree.is_building, True), agree.within(noise.current, noise.Draws(None)):
            return step(data)

    of_all, logs = _run(of_one, data)
    mine, divided_logs = _run(divided, data)
    if mine:
        mine = ops.reduce_tensors(mine, op=ops.Sum, name="gradients of the first step")
    largest = max([float(tf.reduce_max(tf.abs(one))) for one in of_all], default=0.0)
    differing = len(of_all) != len(mine) or any(
        _differ(one.numpy(), other.numpy(), _OF_ALL * largest)
        for one, other in zip(of_all, mine, strict=False)
    )
    wrong = [
        key for key, value in logs.items() if _differ(value, divided_logs.get(key, np.inf), 1e-6)
    ]
    if differing or wrong:
        what = "gradients are" if differing else f"{', '.join(wrong)} in the logs is"
        raise ValueError(
            f"hvdrun --auto: the step of model {model.name!r} cannot be divided: its {what} not "
            "the mean over the rows of the batch, as if it takes a sum over the rows, compares "
            "them with each other, or depends on their number. Take a mean "
            "over the rows (tf.reduce_mean), or run the script without --auto."
        )


def _run(step: Callable[..., Any], data: Any) -> tuple[list[Any], dict[str, Any]]:
    """The gradients and logs of a step, whose changes are put back."""

    def made(data: Any) -> Any:
        seen: list[Any] = []
        with agree.within(gradients, seen):
            logs = step(data)
        return [tf.convert_to_tensor(gradient) for gradient in seen], logs

    run = tf.function(made, autograph=False)
    # A trace creates variables, and finds all that the step uses.
    touched = list(run.get_concrete_function(data).variables)
    before = [(v, tf.identity(v)) for v in touched]
    found, logs = run(data)
    for variable, value in before:
        variable.assign(value)
    named = logs if isinstance(logs, dict) else {"what it returns": logs}
    flat = {k: np.asarray(tf.nest.flatten(v)) for k, v in named.items()}
    return list(found), flat


def _differ(one: Any, other: Any, least: float) -> bool:
    one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
    if not np.isfinite(one).all():
        return False  # as with the first scales of mixed precision
    return bool(
        np.abs(one - other).max(initial=0) > _TOLERANCE * np.abs(one).max(initial=0) + least
    )
