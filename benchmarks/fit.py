"""Steps of Keras's fit on all ranks, compared with one process with the batch of one rank.

    hvdrun -np 2 python benchmarks/fit.py

In turn, in one job: all ranks train together; each rank trains a separate model at the same time,
so that they share the machine but exchange nothing; rank 0 trains alone while the others sleep,
without XLA (like all of the above) and with XLA. All ranks also train together with
steps_per_execution=10. The time is that of the second epoch of each fit.
The input is one batch in memory, repeated.
"""

import time

import clock  # first
import keras
import keras_models
import numpy as np
import report
import tensorflow as tf

import hvd_keras as hvd


def compiled(case: str, distributed: bool, xla: bool = False, **options) -> keras.Model:
    model, optimizer = keras_models.made(case)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, keras_models.loss(), jit_compile=xla, **options)
    return model


def dataset(x: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensors((x, labels)).cache().repeat()
    return data.with_options(options)


class Stopwatch(keras.callbacks.Callback):
    """Seconds of the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self.start


def check(case: str) -> None:
    """A few steps of all ranks end where one process with all ranks' batches ends."""
    model = compiled(case, distributed=True)
    model.fit(
        dataset(*keras_models.batch(case, hvd.rank())), steps_per_epoch=5, shuffle=False, verbose=0
    )
    batches = zip(*(keras_models.batch(case, rank) for rank in range(hvd.size())), strict=True)
    single = compiled(case, distributed=False)
    before = single.get_weights()
    data = dataset(*map(np.concatenate, batches))
    with hvd.local_fit():
        single.fit(data, steps_per_epoch=5, shuffle=False, verbose=0)
    for got, wanted, old in zip(model.get_weights(), single.get_weights(), before, strict=True):
        clock.expect(np.allclose(got, wanted, rtol=1e-4, atol=1e-6), "weights after 5 steps")
        clock.expect(not np.array_equal(got, old), "weights have not moved")


def rows_of(case: str, steps: int, repeats: int) -> list[report.Row]:
    check(case)
    data = dataset(*keras_models.batch(case, hvd.rank()))

    def step(model: keras.Model) -> float:
        watch = Stopwatch()
        model.fit(
            data, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[watch]
        )
        return watch.seconds / steps

    def alone(model: keras.Model, ranks: int = hvd.size()) -> float:
        with hvd.local_fit():
            return step(model) if hvd.rank() < ranks else 0.0

    def by_rank_0(model: keras.Model):
        return lambda: alone(model, 1)

    together, beside = compiled(case, distributed=True), compiled(case, distributed=False)
    several = compiled(case, distributed=True, steps_per_execution=10)
    times = clock.interleaved(
        {
            "ours": lambda: step(together),
            "steps_per_execution=10": lambda: step(several),
            "as many processes that exchange nothing": lambda: alone(beside),
            "one process": by_rank_0(compiled(case, distributed=False)),
            "one process, with XLA": by_rank_0(compiled(case, distributed=False, xla=True)),
        },
        repeats,
    )
    ours = times.pop("ours")
    parameters = together.count_params()
    what = f"a step of fit, {case}, {parameters:,} parameters, batch {keras_models.BATCH} per rank"
    return [
        report.compare(what, hvd.size(), against, ours, theirs) for against, theirs in times.items()
    ]


def main() -> None:
    options = clock.options(__doc__, repeats=9)
    rows = []
    for case in ("perceptron", "embedding, SGD") if options.smoke else keras_models.CASES:
        steps = 20 if case == "embedding, Adam" else 50
        rows += rows_of(case, 10 if options.smoke else steps, options.repeats)
    if hvd.rank() == 0:
        report.show(rows, options.json)


if __name__ == "__main__":
    main()
