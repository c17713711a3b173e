"""A training step whose gradients are exchanged over slow links. hosts.py runs it under mpirun.

Rank 0 prints a line of JSON with the seconds of the slowest rank, by repeat: for a step without
exchange on all ranks at once, for the exchange of its gradients alone, and for a step with both. In
the timeline, one more step lies between two named allreduces.
"""

import argparse
import json

import clock  # first
import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients.agreement import ExchangeOptions
from hvd_keras.gradients.reducer import GradientReducer


def compiled(layers: int, width: int, distributed: bool) -> keras.Model:
    """Returns a stack of equal dense layers, whose gradients become ready one by one."""
    keras.utils.set_random_seed(1)
    stack = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack])
    optimizer = keras.optimizers.SGD(1e-3)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    together = compiled(options.layers, options.width, distributed=True)
    alone = compiled(options.layers, options.width, distributed=False)
    random = np.random.default_rng(hvd.rank())
    x = tf.constant(random.normal(size=(options.batch, options.width)).astype("float32"))

    variables = [tf.TensorSpec(v.shape, tf.float32) for v in alone.trainable_variables]
    gradients = [tf.constant(random.normal(size=v.shape).astype("float32")) for v in variables]
    reducer = GradientReducer("exchange", ExchangeOptions(), 0)
    exchange = tf.function(lambda tensors: reducer.reduce(tensors, variables), autograph=False)

    means = [hvd.allreduce(gradient, name="check").numpy() for gradient in gradients]
    for mean, got in zip(means, exchange(gradients), strict=True):
        clock.expect(np.allclose(mean, got, atol=1e-6), "averages")
    before = together.get_weights()
    together.train_on_batch(x, x)
    times = clock.interleaved(
        {
            "compute": clock.together(lambda: alone.train_on_batch(x, x)),
            "exchange": clock.together(lambda: exchange(gradients)),
            "both": clock.together(lambda: together.train_on_batch(x, x)),
        },
        options.repeats,
    )
    for old, new in zip(before, together.get_weights(), strict=True):
        clock.expect(np.array_equal(hvd.broadcast(new, 0, name="weights"), new), "ranks differ")
        clock.expect(not np.array_equal(old, new), "weights have not moved")
    hvd.allreduce(0.0, name="before the step")
    together.train_on_batch(x, x)
    hvd.allreduce(0.0, name="after the step")
    if hvd.rank() == 0:
        print(json.dumps({name: list(taken) for name, taken in times.items()}), flush=True)


if __name__ == "__main__":
    main()
