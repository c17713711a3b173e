"""The collectives of ``horovod.keras`` and ``horovod.tensorflow.keras``.

Their arguments differ from those of ``horovod.tensorflow``. In a TensorFlow 1 graph they return
values, not tensors of the graph.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.compat import tensorflow_v1
from hvd_keras.horovod import collectives
from hvd_keras.runtime.keras import is_legacy


def _value(result: Any) -> Any:
    """In a TensorFlow 1 graph what the session makes of a result."""
    if tf.executing_eagerly() or tf.inside_function():
        return result
    if is_legacy:
        return tf.compat.v1.keras.backend.get_session().run(result)
    session = tf.compat.v1.get_default_session()
    if session is not None:
        return session.run(result)
    with tf.compat.v1.Session() as own:
        return own.run(result)


def _on_values(function: Callable[..., Any], names: str) -> Callable[..., Any]:
    """The function with these arguments, in this order, after ``value``, the tensor."""
    known = inspect.signature(function).parameters
    value = inspect.Parameter("value", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([value, *(known[name] for name in names.split())])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return _value(function(given.pop("value"), **given))

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


allreduce = _on_values(
    collectives.allreduce, "name average prescale_factor postscale_factor op compression"
)
allgather = _on_values(collectives.allgather, "name")
broadcast = _on_values(collectives.broadcast, "root_rank name")
reducescatter = _on_values(collectives.reducescatter, "name op")


def broadcast_global_variables(root_rank: int) -> Any:
    """Assigns the root's values to all global variables of the graph, at once.

    Args:
        root_rank: the rank whose values all get.

    Raises:
        As ``hvd_keras.broadcast_global_variables``.
    """
    return _value(tensorflow_v1.broadcast_global_variables(root_rank))
