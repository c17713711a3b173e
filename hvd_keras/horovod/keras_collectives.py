"""The collectives of ``horovod.keras`` and ``horovod.tensorflow.keras``.

Their arguments differ from those of ``horovod.tensorflow``. In a TensorFlow 1 graph they return
values, not tensors of the graph.
"""

from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.compat import tensorflow_v1
from hvd_keras.horovod import collectives
from hvd_keras.ops.compression import Compression, Compressor
from hvd_keras.runtime.keras import is_legacy


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ops.ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Combines a tensor over all ranks.

    Args:
        value: what ``tf.constant`` takes, of the same dtype and shape on all ranks.
        name: identifies the call on all ranks.
        average, prescale_factor, postscale_factor, op, compression: as in ``hvd_keras.allreduce``.

    Raises:
        As ``hvd_keras.allreduce``.
    """
    return _value(
        collectives.allreduce(
            value,
            average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenates all ranks' tensors along the first dimension.

    Args:
        value: a tensor with at least one dimension; the first one may differ by rank.
        name: identifies the call on all ranks.

    Raises:
        As ``hvd_keras.allgather``.
    """
    return _value(collectives.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Gives every rank the tensor of one.

    Args:
        value: a tensor of the same dtype and shape on all ranks.
        root_rank: the rank whose values all get.
        name: identifies the call on all ranks.

    Raises:
        As ``hvd_keras.broadcast``.
    """
    return _value(collectives.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: ops.ReduceOp = ops.Average) -> Any:
    """``allreduce`` of which each rank gets only its share of the rows.

    Args:
        value: a tensor with at least one dimension, of the same shape on all ranks.
        name: identifies the call on all ranks.
        op: ``hvd.Average`` or ``hvd.Sum``.

    Raises:
        As ``hvd_keras.reducescatter``.
    """
    return _value(collectives.reducescatter(value, op=op, name=name))


def broadcast_global_variables(root_rank: int) -> Any:
    """Assigns the root's values to all global variables of the graph, at once.

    Args:
        root_rank: the rank whose values all get.

    Raises:
        As ``hvd_keras.broadcast_global_variables``.
    """
    return _value(tensorflow_v1.broadcast_global_variables(root_rank))


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
