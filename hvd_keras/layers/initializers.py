"""Initial values of a part of a table: those that one process would draw for the whole.

The values are drawn block by block, so that no rank holds the whole table.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.gradients.shards import Part
from hvd_keras.runtime.keras import keras

# For each distribution: TensorFlow's op, and by how much 4 values advance the generator's counter.
_DRAWS = {
    "uniform": (tf.raw_ops.StatelessRandomUniformV2, 1),
    "untruncated_normal": (tf.raw_ops.StatelessRandomNormalV2, 1),
    "truncated_normal": (tf.raw_ops.StatelessTruncatedNormalV2, 256),
}
_PHILOX = 1  # the algorithm of tf.random.stateless_uniform and others, except on TPUs
# So much narrower is a normal distribution once it is cut at two standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978


def of_part(whole: Any, table: tuple[int, int], part: Part) -> Callable[..., Any]:
    """Return an initializer of a part of a table, as ``whole`` would initialize all of it.

    An initializer of which a part cannot be drawn is called for the whole, of the shape ``table``.
    """

    def initialize(shape: Any, dtype: Any = None) -> Any:
        dtype = keras.backend.standardize_dtype(dtype)
        if part.shape == table:
            return whole(table, dtype=dtype)
        how = table[1], tf.as_dtype(dtype).as_numpy_dtype
        with tf.init_scope():  # Keras builds models of the user's classes in a graph
            if draw := _drawer(whole, table, dtype):
                return part.read(draw, *how)
            values = np.asarray(whole(table, dtype=dtype))
            return part.read(lambda first, last: values[first:last], *how)

    return initialize


def _drawer(initializer: Any, shape: tuple[int, int], dtype: str) -> Callable[..., Any] | None:
    """Return a function that draws rows [first, last), first being a multiple of 4; or None."""
    initializers = keras.initializers

    def is_a(*names: str) -> bool:
        classes = [getattr(initializers, name) for name in names]
        return any(
            isinstance(initializer, c) and type(initializer).__call__ is c.__call__ for c in classes
        )

    if is_a("Zeros", "Ones") or (is_a("Constant") and np.ndim(initializer.value) == 0):
        return lambda first, last: np.asarray(initializer((last - first, shape[1]), dtype=dtype))
    if dtype != "float32":  # others take more or fewer numbers of the generator for each value
        return None
    if is_a("RandomUniform"):
        return _blocks("uniform", initializer, initializer.minval, initializer.maxval, shape, dtype)
    if is_a("RandomNormal", "TruncatedNormal"):
        kind = "truncated_normal" if is_a("TruncatedNormal") else "untruncated_normal"
        return _blocks(kind, initializer, initializer.mean, initializer.stddev, shape, dtype)
    if not is_a("VarianceScaling"):
        return None
    if getattr(initializer, "input_axes", None) or getattr(initializer, "output_axes", None):
        return None
    fans = {"fan_in": shape[0], "fan_out": shape[1], "fan_avg": sum(shape) / 2}
    scale = initializer.scale / max(1.0, fans[initializer.mode])
    kind = initializer.distribution
    if kind == "uniform":
        limit = math.sqrt(3.0 * scale)
        return _blocks(kind, initializer, -limit, limit, shape, dtype)
    stddev = math.sqrt(scale) / (_TRUNCATED_STDDEV if kind == "truncated_normal" else 1)
    return _blocks(kind, initializer, 0.0, stddev, shape, dtype)


def _blocks(
    kind: str, initializer: Any, one: float, two: float, shape: tuple[int, int], dtype: str
) -> Callable[..., Any] | None:
    """Draws as ``tf.random.stateless_uniform`` and others do, from the middle of their stream."""
    if not isinstance(initializer.seed, int):  # a generator, whose state each draw changes
        return None
    draw, advance = _DRAWS[kind]
    # As Keras makes TensorFlow's seed from its own.
    seed = tf.cast(tf.constant([initializer.seed, 0], tf.int64) % (tf.int32.max - 1), tf.int32)

    def block(first: int, last: int) -> Any:
        key, start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        low, high = (int(word) for word in start.numpy())
        counter = (low | high << 64) + first * shape[1] // 4 * advance
        words = [counter >> 64 * i & (1 << 64) - 1 for i in (0, 1)]
        drawn = draw(
            shape=[last - first, shape[1]],
            key=key,
            counter=tf.constant(words, tf.uint64),
            alg=_PHILOX,
            dtype=dtype,
        )
        a, b = tf.cast(one, dtype), tf.cast(two, dtype)
        return (drawn * (b - a) + a if kind == "uniform" else drawn * b + a).numpy()

    return block
