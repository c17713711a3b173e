"""Compares a model's first step with that of one process, before it is made.

A step that is not Keras's own may sum or compare the rows of its batch, which the ranks' parts do
not add up to. So on the first batch, that of one process and the divided one are made, and undone.
If gradients, logs or variables differ, all ranks will compute all rows.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.auto import noise
from hvd_keras.gradients import model_ranks, shards
from hvd_keras.runtime import agree

#: The gradients of variables that the present step computes, if they are to be compared.
gradients: contextvars.ContextVar[Any] = contextvars.ContextVar("gradients", default=None)

# Relative to the largest of the same values, of float32 and of half precision; and to the largest
# of all gradients, as some are nothing but rounding: what is falsely found costs speed, no more.
_TOLERANCE, _OF_HALF, _OF_ALL = 2e-4, 1e-2, 1e-5


def is_known(model: Any, method: str) -> bool:
    """Whether a model's step consists of Keras's own parts, which divide."""
    own = ("compute_loss", "compute_metrics", "get_metrics_result", method)
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in own):
        return False
    layers = [*model._flatten_layers()]
    parts = [*layers, *(getattr(layer, "operations", ()) for layer in layers)]
    parts += [getattr(layer, "activation", None) for layer in layers]
    if method != "predict_step" and model.compiled:
        of_metrics = model._compile_metrics
        parts += [getattr(model._compile_loss, "_user_loss", None)]
        parts += [getattr(of_metrics, f"_user_{kind}metrics", None) for kind in ("", "weighted_")]
    return all(map(_is_keras, tf.nest.flatten(parts)))


def _is_keras(part: Any) -> bool:
    """Whether a layer, loss, metric or activation is one of Keras's that divide, or a name."""
    kind = part if hasattr(part, "__name__") else type(part)
    function = getattr(part, "_fn", getattr(part, "fn", kind))
    homes = [str(getattr(one, "__module__", "")) for one in (kind, function)]
    return (
        all(home.startswith(("keras.", "builtins")) for home in homes)
        and not homes[0].startswith("keras.src.ops.")  # such as the mean of all rows
        and kind.__name__ not in ("Lambda", "MixUp", "CutMix", "AugMix")
        and getattr(part, "activity_regularizer", None) is None  # older Keras sums over the rows
    )


def compare(model: Any, divided: Any, data: Any) -> str:
    """Make a step both ways, and undo both; returns why it cannot be divided, or ""."""

    def of_one(data: Any) -> Any:
        with agree.within(agree.is_building, True), agree.within(noise.current, noise.draws(None)):
            return divided.__wrapped__(data)

    of_all, expected = _run(model, _traced(of_one, data), data)
    step, error = None, ""
    try:
        step = _traced(divided, data)
    except Exception as caught:  # fewer rows than such a step needs, perhaps on one rank
        error = f"it fails with a part of a batch: {caught}".splitlines()[0]
    if any(errors := agree.gather_json("a first step", error)):
        return str(next(filter(None, errors)))
    mine, results = _run(model, step, data)
    is_half = any(layer.compute_dtype.endswith("float16") for layer in model._flatten_layers())
    differ = functools.partial(_are_unequal, _OF_HALF if is_half else _TOLERANCE)
    if mine:
        mine = ops.reduce_tensors(mine, op=ops.Sum, name="gradients of the first step")
    largest = max([float(tf.reduce_max(tf.abs(one))) for one in of_all], default=0.0)
    pairs = zip(of_all, mine, strict=False)
    wrong = []
    if len(of_all) != len(mine) or any(differ(*pair, _OF_ALL * largest) for pair in pairs):
        wrong.append("gradient")
    wrong += [key[0] for key in expected if differ(expected[key], results.get(key, ()), 1e-6)]
    # What a step leaves in variables may differ on one rank alone.
    found = [*filter(None, agree.gather_json("parts of a first step", wrong))]
    if not found:
        return ""
    return (
        f"its {found[0][0]} is not the mean over the rows of the batch: it may sum or compare "
        "them, or depend on their number (use means such as tf.reduce_mean)"
    )


def _traced(step: Callable[..., Any], data: Any) -> Any:
    """A function of a step's gradients and logs. The trace creates variables, and finds them."""

    def made(data: Any) -> Any:
        seen: list[Any] = []
        with agree.within(gradients, seen):
            logs = step(data)
        return [tf.convert_to_tensor(gradient) for gradient in seen], logs

    function = tf.function(made, autograph=False)
    return function, list(function.get_concrete_function(data).variables)


def _run(model: Any, traced: Any, data: Any) -> tuple[list[Any], dict[tuple[str, int], Any]]:
    """The gradients of a step; its results, and the changes that it makes, which are undone."""
    function, touched = traced
    before = [tf.identity(variable) for variable in touched]
    found, logs = function(data)
    # Changes of trained variables follow from the gradients.
    optimizers = model_ranks.optimizers_of(model)
    trained = [model.trainable_variables, *(optimizer.variables for optimizer in optimizers)]
    left_out = {shards.variable_id(variable) for some in trained for variable in some}
    results = {
        (f"result {key}".strip(), number): leaf
        for key, value in (logs if isinstance(logs, dict) else {"": logs}).items()
        for number, leaf in enumerate(tf.nest.flatten(value, expand_composites=True))
    }
    for variable, value in zip(touched, before, strict=True):
        if variable.dtype.is_floating and shards.variable_id(variable) not in left_out:
            results[f"change of variable {variable.name}", id(variable)] = variable - value
        variable.assign(value)
    return list(found), results


def _are_unequal(tolerance: float, one: Any, other: Any, least: float) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.dtype.kind in "OSU":
        return not np.array_equal(one, other)
    one, other = one.astype("float64"), other.astype("float64")
    if not np.isfinite(one).all():
        return False  # as with the first scales of mixed precision
    return bool(np.abs(one - other).max(initial=0) > tolerance * np.abs(one).max(initial=0) + least)
