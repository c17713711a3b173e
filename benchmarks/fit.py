"""Steps of Keras's fit on all ranks, compared with one process with the batch of one rank.

    hvdrun -np 2 python benchmarks/fit.py

In turn, in one job: all ranks train together; each rank trains a separate model at the same time,
so that they share the machine but exchange nothing; rank 0 trains alone while the others sleep,
without XLA (like all of the above) and with XLA. The time is that of the second epoch of each fit.
The input is one batch in memory, repeated.
"""

import time

import clock  # first
import keras
import numpy as np
import report
import tensorflow as tf

import hvd_keras as hvd

BATCH = 64


def perceptron() -> keras.Model:
    layers = [keras.layers.Flatten()]
    layers += [keras.layers.Dense(n, activation="relu") for n in (256, 128)]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10)])


def convnet() -> keras.Model:
    layers = []
    for filters in (16, 32):
        layers += [keras.layers.Conv2D(filters, 3, activation="relu"), keras.layers.MaxPool2D()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10)])


def compiled(build, distributed: bool, xla: bool = False) -> keras.Model:
    """With the same first weights at every call, on every rank."""
    keras.utils.set_random_seed(1)
    model = build()
    optimizer = keras.optimizers.SGD(0.01)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=xla)
    return model


def batch(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    images = random.normal(size=(BATCH, 28, 28, 1)).astype("float32")
    return images, random.integers(0, 10, BATCH)


def dataset(images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensors((images, labels)).cache().repeat()
    return data.with_options(options)


class Stopwatch(keras.callbacks.Callback):
    """Seconds of the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self.start


def check(build) -> None:
    """A few steps of all ranks end where one process with all ranks' batches ends."""
    model = compiled(build, distributed=True)
    model.fit(dataset(*batch(hvd.rank())), steps_per_epoch=5, shuffle=False, verbose=0)
    batches = zip(*map(batch, range(hvd.size())), strict=True)
    single = compiled(build, distributed=False)
    before = single.get_weights()
    single.fit(dataset(*map(np.concatenate, batches)), steps_per_epoch=5, shuffle=False, verbose=0)
    for got, wanted, old in zip(model.get_weights(), single.get_weights(), before, strict=True):
        clock.expect(np.allclose(got, wanted, rtol=1e-4, atol=1e-6), "weights after 5 steps")
        clock.expect(not np.array_equal(got, old), "weights have not moved")


def rows_of(build, steps: int, repeats: int) -> list[report.Row]:
    check(build)
    data = dataset(*batch(hvd.rank()))

    def step(model: keras.Model) -> float:
        watch = Stopwatch()
        model.fit(
            data, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[watch]
        )
        return watch.seconds / steps

    def by_rank_0(model: keras.Model):
        return lambda: step(model) if hvd.rank() == 0 else 0.0

    together, beside = compiled(build, distributed=True), compiled(build, distributed=False)
    times = clock.interleaved(
        {
            "ours": lambda: step(together),
            "as many processes that exchange nothing": lambda: step(beside),
            "one process": by_rank_0(compiled(build, distributed=False)),
            "one process, with XLA": by_rank_0(compiled(build, distributed=False, xla=True)),
        },
        repeats,
    )
    ours = times.pop("ours")
    parameters = together.count_params()
    what = f"a step of fit, {build.__name__}, {parameters:,} parameters, batch {BATCH} per rank"
    return [
        report.compare(what, hvd.size(), against, ours, theirs) for against, theirs in times.items()
    ]


def main() -> None:
    options = clock.options(__doc__, repeats=9)
    rows = []
    for build in (perceptron, convnet):
        rows += rows_of(build, 2 if options.smoke else 50, options.repeats)
    if hvd.rank() == 0:
        report.show(rows, options.json)


if __name__ == "__main__":
    main()
