"""Initial values of a part of a table: those that one process would draw for the whole.

The values are drawn block by block, so that no rank holds the whole table.
"""

import functools
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
    # Other dtypes take more or fewer numbers of the generator for each value. A seed may be a
    # generator, whose state each draw changes.
    if dtype != "float32" or not isinstance(getattr(initializer, "seed", None), int):
        return None
    how = None
    if is_a("RandomUniform"):
        how = "uniform", initializer.minval, initializer.maxval
    elif is_a("RandomNormal"):
        how = "untruncated_normal", initializer.mean, initializer.stddev
    elif is_a("TruncatedNormal"):
        how = "truncated_normal", initializer.mean, initializer.stddev
    elif is_a("VarianceScaling"):
        fans = {"fan_in": shape[0], "fan_out": shape[1], "fan_avg": sum(shape) / 2}
        scale = initializer.scale / max(1.0, fans[initializer.mode])
        kind, limit = initializer.distribution, math.sqrt(3.0 * scale)
        stddev = math.sqrt(scale) / (_TRUNCATED_STDDEV if kind == "truncated_normal" else 1)
        how = (kind, -limit, limit) if kind == "uniform" else (kind, 0.0, stddev)
    has_axes = getattr(initializer, "input_axes", None) or getattr(initializer, "output_axes", None)
    if how is None or has_axes:
        return None
    return functools.partial(_drawn, initializer.seed, shape[1], *how)


def _drawn(
    seed: int, columns: int, kind: str, one: float, two: float, first: int, last: int
) -> Any:
    """Draws as ``tf.random.stateless_uniform`` and others do, from the middle of their stream."""
    draw, advance = _DRAWS[kind]
    # As Keras makes TensorFlow's seed from its own.
    seeds = tf.cast(tf.constant([seed, 0], tf.int64) % (tf.int32.max - 1), tf.int32)
    key, start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seeds)
    low, high = (int(word) for word in start.numpy())
    counter = (low | high << 64) + first * columns // 4 * advance
    words = tf.constant([counter >> 64 * i & (1 << 64) - 1 for i in (0, 1)], tf.uint64)
    drawn = draw(shape=[last - first, columns], key=key, counter=words, alg=_PHILOX)
    a, b = tf.cast(one, drawn.dtype), tf.cast(two, drawn.dtype)
    return (drawn * (b - a) + a if kind == "uniform" else drawn * b + a).numpy()
