"""Making the variables of a model that would come to life inside its first training step.

A Sequential without ``Input`` and most subclassed models have no variables before Keras traces
their first step, which is too late for all that happens before it: broadcast, restored
checkpoints, seeds.
"""

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvd_keras import log
from hvd_keras._keras import is_legacy, keras

_building = contextvars.ContextVar("hvd_keras is building a model", default=False)


def is_building() -> bool:
    """Whether a training step is traced only for the variables that it makes."""
    return _building.get()


# The layers that had no variables after their model's step had been traced: they are not used.
_unused: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def is_built(model: Any) -> bool:
    """Whether all layers of a model that can have variables before its first step have them."""
    return unbuilt(model) <= _unused.get(model, set())


def unbuilt(model: Any) -> set[int]:
    """The ids of the layers without variables."""
    return {id(layer) for layer in model._flatten_layers() if not layer.built}


def build(model: Any, element_spec: Any) -> Exception | None:
    """Makes the variables of a model, its metrics and its optimizers, from the spec of a batch.

    Traces the forward pass into a graph that never runs; or, if the model has a ``train_step`` of
    its own, that. Variables are made outside of the graph, as in every step that Keras traces.

    Args:
        model: a compiled ``keras.Model``.
        element_spec: of what ``train_step`` gets, as ``tf.data.Dataset.element_spec``.

    Returns:
        What the model raised, if it cannot be traced: then the variables may be missing.
    """
    has_own_step = type(model).train_step is not _default_train_step()

    def forward(data: Any) -> None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        # As Keras's train_step calls it.
        if getattr(model, "_call_has_training_arg", True):
            model(x, training=True)
        else:
            model(x)

    def step(data: Any) -> None:
        model.train_step(data)

    traced = step if has_own_step else forward
    if hasattr(model, "_autoconvert_optionals"):
        traced = model._autoconvert_optionals(traced)
    token = _building.set(True)
    try:
        with _traced_functions():
            tf.function(traced, autograph=is_legacy).get_concrete_function(element_spec)
    except Exception as error:
        log.logger.debug("model %s cannot be traced before its first step: %r", model.name, error)
        if has_own_step or not model.run_eagerly or not _call_on_zeros(model, element_spec):
            return error
    finally:
        _building.reset(token)
    _unused[model] = unbuilt(model)
    return None


def _call_on_zeros(model: Any, element_spec: Any) -> bool:
    """Calls a model that runs eagerly, and cannot be traced, on a batch of one row of zeros."""

    def zeros(spec: tf.TensorSpec) -> tf.Tensor:
        return tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype)

    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    try:
        model(tf.nest.map_structure(zeros, x), training=False)
    except Exception as error:
        log.logger.debug("model %s cannot be called on zeros: %r", model.name, error)
        return False
    return True


def _default_train_step() -> Any:
    return keras.Model.train_step


@contextlib.contextmanager
def _traced_functions() -> Iterator[None]:
    """Functions are traced here, also after ``tf.config.run_functions_eagerly(True)``."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(False)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
