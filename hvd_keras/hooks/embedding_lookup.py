"""Lookups in tables whose rows the optimizer updates one by one.

After the first such update TensorFlow copies a variable whenever it is read as a whole, and Keras's
``Embedding`` reads its whole table to gather a few rows. Reading only these rows gives the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvd_keras.gradients import agreement, model_ranks, shards
from hvd_keras.runtime.keras import keras

_tables = agreement.VariableSet()


def read_by_rows(model: Any, layers: Iterable[Any]) -> None:
    """Lets the embeddings of a model read only what is looked up, if the optimizer updates rows."""
    if not any(map(_updates_rows, model_ranks.optimizers_of(model))):
        return
    for layer in layers:
        if isinstance(layer, keras.layers.Embedding) and layer.built:
            for variable in layer.trainable_variables:
                _tables.add(variable)


def wrap_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Embedding.call``. Negative indices count from the end, as they do in Keras."""

    def look_up(self: Any, inputs: Any) -> Any:
        # A tensor if it is quantized, has an adapter, or is cast by mixed precision.
        table = shards.inner_variable(self.embeddings)
        if not (isinstance(table, tf.Variable) and table in _tables):
            return call(self, inputs)
        if not isinstance(inputs, tf.Tensor):  # ragged or sparse
            return call(self, inputs)
        indices = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        indices = tf.where(indices < 0, indices + table.shape[0], indices)
        return tf.cast(tf.gather(table, indices), self.compute_dtype)

    look_up.__doc__ = call.__doc__
    return look_up


def _updates_rows(optimizer: Any) -> bool:
    """Whether sparse gradients stay sparse until they are applied.

    Other optimizers, and means over several steps, update the whole table. A lookup by rows would
    then make TensorFlow copy it where something else reads it, such as weight decay.
    """
    optimizer = model_ranks.innermost(optimizer)
    reducer = model_ranks.of_optimizer(optimizer)
    kinds = keras.optimizers
    by_rows = (kinds.SGD, kinds.RMSprop, kinds.Adagrad, kinds.Adadelta, kinds.Adafactor)
    return (
        isinstance(optimizer, by_rows)
        and not getattr(optimizer, "momentum", 0)
        and not optimizer.gradient_accumulation_steps
        and reducer is not None
        and not reducer.options.sparse_as_dense
    )
