"""Ranks with batches of different sizes train as one process with their sum."""

import keras
import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from pyarrow import parquet

import hvd_keras as hvd
from hvd_keras.data.parquet import Tables
from hvd_keras.data.tensorflow import arrays
from hvd_keras.gradients import missing_calls
from tests.harness import training
from tests.harness.shards import error_of

pytestmark = pytest.mark.ranks(2, 3)
RANK, SIZE = hvd.rank(), hvd.size()
SIZES = [6, 2, 4][:SIZE]
TOTAL, STEPS = sum(SIZES), 4
LENGTH, WORDS = TOTAL * STEPS, 9


def rows(length: int = LENGTH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.integers(0, WORDS, size=(length, 5))  # 0 is masked
    return x, random.normal(size=(length, 5, 1)), random.uniform(0.2, 3, size=(length, 5))


def made(distributed: bool, reduction: str) -> keras.Model:
    keras.utils.set_random_seed(RANK)
    layers = [keras.layers.Embedding(WORDS, 3, mask_zero=True), keras.layers.Dense(1)]
    layers[1].kernel_regularizer = keras.regularizers.L2(0.1)
    model = keras.Sequential([keras.Input((5,)), *layers])
    training.set_weights(model, seed=RANK)
    optimizer = keras.optimizers.SGD(0.5)
    if distributed:  # the learning rate makes a mean of the ranks' means
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5 / SIZE), op=hvd.Sum)
    loss = keras.losses.Huber(reduction=reduction)
    model.compile(optimizer, loss, weighted_metrics=["mae"])
    return model


def mine(part: np.ndarray) -> np.ndarray:
    """This rank's rows of each step."""
    first = sum(SIZES[:RANK])
    steps = part.reshape(-1, TOTAL, *part.shape[1:])
    return steps[:, first : first + SIZES[RANK]].reshape(-1, *part.shape[1:])


# Random programs (tests/programs) have other losses, and data of other kinds.
def test_each_row_counts_alike_in_a_sum() -> None:
    """In gradients and logs, also after a fit in which all ranks had equal batches."""
    parts, reduction = rows(), "mean_with_sample_weight"
    model = made(True, reduction)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    callbacks += [hvd.callbacks.MetricAverageCallback()]
    x, y, weights = (part[: SIZE * 2] for part in parts)
    equal = hvd.data.shard((x, y, weights), batch_size=2, shuffle=False)
    model.fit(equal, verbose=0, callbacks=callbacks)
    data = {"x": mine(parts[0]), "y": mine(parts[1]), "sample_weight": mine(parts[2])}
    data["batch_size"] = SIZES[RANK]
    options = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = model.fit(**data, **options).history
    training.assert_bit_identical_on_all_ranks(model)
    if RANK > 0:
        return
    alone = made(False, reduction)
    alone.fit(x, y, sample_weight=weights, batch_size=SIZE * 2, shuffle=False, verbose=0)
    options = {"sample_weight": parts[2], "batch_size": TOTAL}
    expected = alone.fit(*parts[:2], **options, epochs=2, shuffle=False, verbose=0).history
    training.assert_close(model, alone)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4, err_msg=name)


def test_rows_of_predictions_count() -> None:
    """Not those of the data, such as edges of a graph with predictions for its nodes."""

    class Nodes(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

        def call(self, x):
            return self.dense(x["nodes"]) + 0 * keras.ops.mean(x["edges"])

    def data(rank: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        x = np.random.default_rng(rank).normal(size=(SIZES[rank], 2)).astype("float32")
        return {"edges": np.ones((7 - SIZES[rank], 2), "float32"), "nodes": x}, x[:, :1] + rank

    specs = tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])
    signature = {"edges": specs[0], "nodes": specs[0]}, specs[1]
    mine = tf.data.Dataset.from_generator(lambda: [data(RANK)], output_signature=signature)
    model = Nodes()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
    training.fit(model, data=mine, steps_per_epoch=1)
    every = [data(rank) for rank in range(SIZE)]
    x, y = (np.concatenate(p) for p in zip(*((x["nodes"], y) for x, y in every), strict=True))
    np.testing.assert_allclose(model.dense.kernel, 2 * x.T @ y / TOTAL, rtol=1e-4)


def test_a_rank_keeps_its_part_of_the_row_groups(directory, monkeypatch) -> None:
    sizes = [16 * size for size in SIZES]
    groups = 4 * sum(sizes) // 8
    if RANK == 0:
        table = pyarrow.table({"x": np.arange(8 * groups)})
        parquet.write_table(table, directory / "x.parquet", row_group_size=8)
    hvd.barrier()
    monkeypatch.setattr(arrays, "_ROWS", 1)  # steps are looked up one by one
    read, _read = [], Tables._read
    monkeypatch.setattr(Tables, "_read", lambda *group: read.append(group) or _read(*group))
    data = hvd.data.shard(hvd.data.files(f"{directory}/x.parquet"), batch_size=sizes)
    assert len(list(data)) == 4
    assert len(read) < 1.5 * groups


def test_what_cannot_be_weighed(monkeypatch) -> None:
    told = []
    monkeypatch.setattr(missing_calls, "tell", lambda text, *_: told.append(text))

    class Own(training.OwnStep):
        def loss_of(self, x, y):
            return tf.reduce_mean((self(x) - y) ** 2)

    x = np.arange(float(SIZES[RANK])).reshape(-1, 1)
    model = Own([keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3)))
    training.fit(model, data=(x, x), batch_size=SIZES[RANK])
    assert any("each rank counts alike" in text for text in told)


def test_lists_that_cannot_be_used() -> None:
    x = np.arange(60)
    for sizes in ([4], [4, 0, 1][:SIZE], [4.0] * SIZE):
        assert f"expected {SIZE} numbers" in error_of(
            lambda s=sizes: hvd.data.shard(x, batch_size=s)
        )
    sizes = [2, *[1] * (SIZE - 1)]
    differ = error_of(lambda: hvd.data.shard(x, batch_size=[sizes, sizes[::-1]][RANK % 2]))
    assert "different arguments: rank 0: batch_size=[2, 1" in differ
    dataset = tf.data.Dataset.from_tensor_slices(x)
    assert "is a list" in error_of(lambda: hvd.data.shard(dataset, batch_size=SIZES))
