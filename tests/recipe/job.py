"""Run by every rank of a job, with the toy collective built in: compares it with NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd


def values_of(rank: int, dtype: tf.DType) -> np.ndarray:
    """Differ by rank and element, and are exact in every dtype."""
    numbers = np.arange(6).reshape(2, 3) + 10 * rank
    return tf.cast(numbers % 2 if dtype == tf.bool else numbers, dtype).numpy()


def check_values() -> None:
    """In eager code, in a graph, and compiled by XLA."""
    left = (hvd.rank() - 1) % hvd.size()
    traced = tf.function(hvd.shift, jit_compile=False)
    compiled = tf.function(hvd.shift, jit_compile=True)
    for dtype in (tf.float32, tf.bfloat16, tf.int64, tf.bool):
        for call in (hvd.shift, traced, compiled):
            got = call(tf.constant(values_of(hvd.rank(), dtype)))
            np.testing.assert_array_equal(got.numpy(), values_of(left, dtype))
    assert hvd.shift(tf.zeros([0, 3])).shape == (0, 3)


def check_process_set() -> None:
    """Among the first and the last rank alone; with two ranks these are all."""
    if hvd.size() == 2:
        return
    ends = hvd.add_process_set([0, hvd.size() - 1])
    if ends.included():
        got = hvd.shift(tf.constant(float(hvd.rank())), process_set=ends)
        assert float(got) == (hvd.size() - 1 if hvd.rank() == 0 else 0)


def check_gradient() -> None:
    """Rank r weighs what it gets by r + 1, so a rank's input gets its right neighbour's weight."""
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.shift(x)) * (hvd.rank() + 1)
    right = (hvd.rank() + 1) % hvd.size()
    np.testing.assert_array_equal(tape.gradient(loss, x), [right + 1.0] * 2)


def check_errors() -> None:
    """Shapes that differ, and a rank's own wrong argument, fail on all ranks."""
    wrong = [tf.zeros(hvd.rank() + 1), "text" if hvd.rank() == 0 else tf.zeros(1)]
    for number, tensor in enumerate(wrong):
        name = f"wrong.{number}"
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"shift '{name}'"):
            hvd.shift(tensor, name=name)


if __name__ == "__main__":
    hvd.init()
    check_values()
    check_process_set()
    check_gradient()
    check_errors()
    print(f"rank {hvd.rank()} of {hvd.size()}: shift is right", flush=True)
