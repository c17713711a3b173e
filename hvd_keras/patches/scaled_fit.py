"""``hvdrun --auto --scale-batch``: batches N times larger, and the rate that goes with them."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import tensorflow as tf

import hvd_keras
from hvd_keras.gradients import model_ranks
from hvd_keras.patches import patched_fit
from hvd_keras.runtime import rank_info
from hvd_keras.runtime.keras import innermost

# Of optimizers that fit has used: the rate that it has left. Another one is the script's.
_left: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


def fit(fit_as_given: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace ``keras.Model.fit``: larger batches, a larger rate, and a warm-up."""
    bound = inspect.signature(fit_as_given).bind(*args, **kwargs)
    bound.apply_defaults()
    optimizers = model_ranks.optimizers_of(args[0])
    if len(optimizers) != 1:
        refuse(f"a model with {len(optimizers)} optimizers", "one optimizer")
    optimizer = innermost(optimizers[0])
    told = [_scale_batches(bound.arguments), _scale_rate(optimizer, bound.arguments)]
    print("hvdrun --auto --scale-batch:", "; ".join(told), flush=True)
    try:
        return fit_as_given(*bound.args, **bound.kwargs)
    finally:
        _left[optimizer] = float(optimizer.learning_rate)


def refuse(got: str, expected: str, *_: Any, **__: Any) -> NoReturn:
    """Raise ValueError; also in place of a function."""
    raise ValueError(
        f"hvdrun --auto --scale-batch: got {got}; expected {expected}. Or leave --scale-batch out, "
        "and change batch size and learning rate in the script."
    )


def _scale_batches(given: dict[str, Any]) -> str:
    """Change the arguments of ``fit``; returns in words what changes."""
    size, x = rank_info.size(), given["x"]
    if steps := given["steps_per_epoch"]:
        given["steps_per_epoch"] = -(-steps // size)
    if isinstance(x, tf.data.Dataset):
        given["x"] = _joined(x, size)
        return f"{size} batches of the dataset become one"
    if not all(hasattr(part, "shape") for part in tf.nest.flatten(x)):
        refuse(f"data of type {type(x).__name__}", "arrays or a tf.data.Dataset")
    rows = given["batch_size"] or 32  # Keras's default
    given["batch_size"] = size * rows
    given["validation_batch_size"] = given["validation_batch_size"] or rows
    return f"batches of {rows} rows become batches of {size * rows}"


def _joined(data: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Make one batch of each ``count`` batches."""

    def one(*parts: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(parts if len(parts) > 1 else parts[0]).rebatch(1 << 40)

    length = int(data.cardinality())
    joined = data.window(count).flat_map(one)
    known = -(-length // count) if length > 0 else length
    is_known = known != tf.data.UNKNOWN_CARDINALITY
    return joined.apply(tf.data.experimental.assert_cardinality(known)) if is_known else joined


def _scale_rate(optimizer: Any, given: dict[str, Any]) -> str:
    """Change the rate, if it is the script's, and add the warm-up; returns this in words."""
    callbacks = patched_fit.flat(given["callbacks"])
    if any(isinstance(c, keras.callbacks.LearningRateScheduler) for c in callbacks):
        refuse("a LearningRateScheduler", "a rate that fit does not set")
    rate, size = float(optimizer.learning_rate), rank_info.size()
    is_new = optimizer not in _left and int(optimizer.iterations) == 0
    if not is_new and _left.get(optimizer, rate) == rate:
        return f"the learning rate stays {rate:.6g}, with which the optimizer has trained before"
    try:
        optimizer.learning_rate = size * rate
    except TypeError:
        refuse("an optimizer whose learning rate is a schedule", "a number as learning rate")
    told = f"the learning rate {rate:.6g} becomes {size * rate:.6g}"
    if given["initial_epoch"] > 0:
        return f"{told}, without a warm-up, as initial_epoch is not 0"
    epochs = max(1, min(5, given["epochs"] // 10))
    warmup = hvd_keras.callbacks.LearningRateWarmupCallback(size * rate, epochs)
    given["callbacks"] = [warmup, *callbacks]
    return f"{told}, after a warm-up of {epochs} epoch{'s' * (epochs > 1)}"
