"""What ``fit`` and ``hvd.data.shard`` expect of each other."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import data
from tests.harness.shards import BATCH, RANK, SIZE, TOGETHER, error_of, job_pass, numbered, rows_of

pytestmark = pytest.mark.ranks(1, 2)
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to differ from")


def test_floating_point_arrays_become_floatx_as_in_fit() -> None:
    numbers = np.arange(8.0 * SIZE)
    parts = numbers, {"half": numbers.astype("float16"), "count": numbers.astype("int64")}
    dataset = data.shard(parts, batch_size=4, shuffle=False)
    x, y = next(iter(dataset))
    assert (x.dtype, y["half"].dtype, y["count"].dtype) == (tf.float32, tf.float32, tf.int64)
    np.testing.assert_array_equal(x, numbers[RANK : 4 * SIZE : SIZE])
    # A step in plain TensorFlow, which casts nothing.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer=optimizer, loss=lambda y, p: tf.reduce_mean((y[:, None] - p) ** 2))
    model.fit(data.shard((numbers[:, None], numbers), batch_size=4), verbose=0, shuffle=False)


def test_batches_of_a_static_size_keep_it() -> None:
    rows = tf.data.Dataset.from_tensor_slices(numbered(BATCH * (2 * SIZE + 1) + 1))
    batches = rows.batch(BATCH, drop_remainder=True).map(lambda x, y: (x, y))
    dataset = data.shard(batches)
    assert {tuple(spec.shape) for spec in dataset.element_spec} == {(BATCH,)}
    assert len(dataset) == (2 if SIZE > 1 else 3)
    steps = job_pass(dataset)
    assert sorted(rows_of(steps)) == list(range(len(steps) * TOGETHER))
    everything = data.shard(batches, uneven="share")
    assert len(rows_of(job_pass(everything))) == BATCH * (2 * SIZE + 1) // SIZE * SIZE
    with pytest.raises(ValueError, match="do not make whole steps"):
        data.shard(batches.take(1), uneven="trim" if SIZE > 1 else "error", batch_size=BATCH + 1)


@several
def test_a_shuffled_dataset_that_one_rank_has_looked_at_is_refused() -> None:
    def make() -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices(numbered(16 * SIZE))
        return rows.shuffle(64, seed=1).batch(4)

    source = make()
    if RANK == 0:
        next(iter(source))
    assert "look at its rows on all ranks, or on none" in error_of(data.shard, source)
    source = make()
    next(iter(source))
    assert sorted(rows_of(job_pass(data.shard(source)))) == list(range(16 * SIZE))


@several
def test_fit_refuses_shuffled_data_that_one_rank_has_looked_at() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
    x, y = (part[:, None].astype("float32") for part in numbered(8 * SIZE))
    for shuffle in (True, False):
        dataset = data.shard((x, y), batch_size=4, shuffle=shuffle)
        if RANK == 1:
            next(iter(dataset))
        if shuffle:
            with pytest.raises(
                ValueError, match=r"different numbers .*rank 0: \[0\]; rank 1: \[1\]"
            ):
                model.fit(dataset.map(lambda x, y: (x, y)), verbose=0)
        else:
            model.fit(dataset, verbose=0)


def test_fit_with_the_defaults_for_arrays() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
    dataset = data.shard([part[:, None] for part in numbered(8 * SIZE)], batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as Keras's, that it does not shuffle
        model.fit(dataset, verbose=0)
    with pytest.raises(ValueError, match=r"Split the source: hvd\.data\.shard\(\(x\[:n\]"):
        model.fit(dataset, validation_split=0.5, verbose=0)


class Tracked(keras.Model):
    """Logs a mean over steps, as steps of one's own usually do, and one over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.of_steps = self.dense.of_steps = keras.metrics.Mean("of_steps")
        self.of_rows = self.dense.of_rows = keras.metrics.Mean("of_rows")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        number, rows = keras.ops.cast(self.optimizer.iterations, "float32"), tf.shape(data[0])[0]
        self.of_steps.update_state(number)
        self.of_rows.update_state(number, sample_weight=rows)
        return logs | {"of_steps": self.of_steps.result(), "of_rows": self.of_rows.result()}


@pytest.mark.parametrize("eager", [False, True])
def test_logs_of_padded_rows_are_those_of_one_process(eager: bool) -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=(BATCH * SIZE * 2 + 1, 2)).astype("float32")
    y = x.sum(1, keepdims=True) + 9 * (np.arange(len(x)) == len(x) - 1)[:, None]

    def logs(x, wrap, **fit) -> dict:
        model, optimizer = Tracked(), wrap(keras.optimizers.SGD(0.01))
        model.compile(optimizer, "mse", weighted_metrics=["mae"], run_eagerly=eager)
        return model.fit(x, epochs=2, verbose=0, **fit).history

    average = [hvd.callbacks.MetricAverageCallback()]
    padded = data.shard((x, y), batch_size=BATCH, shuffle=False, uneven="pad")
    together = logs(padded, hvd.DistributedOptimizer, callbacks=average)
    with hvd.local_fit():
        whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(TOGETHER)
        alone = logs(whole, lambda optimizer: optimizer)
    assert set(together) == set(alone) == {"loss", "mae", "of_steps", "of_rows"}
    for name, values in alone.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-5, err_msg=name)


def test_a_generator_is_refused_with_what_to_do_instead() -> None:
    rows = (row for row in zip(*numbered(8), strict=True))
    assert "tf.data.Dataset.from_generator(" in error_of(data.shard, rows)
    assert "got a generator" in error_of(data.shard, rows, batch_size=4)
