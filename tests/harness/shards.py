"""Helpers for tests of hvd.data.shard."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import data
from hvd_keras.runtime import agree
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 4  # per rank
TOGETHER = SIZE * BATCH


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, size: int = BATCH, workers: int = 1) -> None:
        super().__init__(workers=workers)
        self.parts, self.size = parts, size

    def __len__(self) -> int:
        return -(-len(self.parts[0]) // self.size)

    def __getitem__(self, index: int):
        return tuple(p[index * self.size : (index + 1) * self.size] for p in self.parts)


def shard(kind: str, *parts, **arguments) -> tf.data.Dataset:
    if kind == "batches":
        return data.shard(Batches(*parts), **arguments)
    if kind == "arrays":
        return data.shard(parts, batch_size=BATCH, **arguments)
    rows = tf.data.Dataset.from_tensor_slices(parts)
    if kind == "whole batches":
        return data.shard(rows.batch(BATCH), **arguments)
    return data.shard(rows, batch_size=BATCH, **arguments)


def numbered(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes rows that contain their number."""
    return np.arange(length), -np.arange(length)


def one_pass(dataset: tf.data.Dataset) -> list[list[list[float]]]:
    """Returns, by step, the numbers of this rank's rows and their weights."""
    steps = []
    for x, y, *weights in dataset:
        np.testing.assert_array_equal(x, -y)
        steps.append([x.numpy().tolist(), (weights[0] if weights else tf.ones(len(x))).numpy()])
    return [[x, weights.tolist()] for x, weights in steps]


def job_pass(dataset: tf.data.Dataset) -> list[dict[int, float]]:
    """Returns, by step, all ranks' rows with a nonzero weight; checks that none is repeated."""
    everyone = agree.gather_json("pass", one_pass(dataset))
    steps = []
    for of_ranks in zip(*everyone, strict=True):  # strict: the same number of steps on all ranks
        rows = [row for x, weights in of_ranks for row in zip(x, weights, strict=True) if row[1]]
        steps.append(dict(rows))
        assert len(steps[-1]) == len(rows), "a row twice"
    return steps


def rows_of(steps: list[dict[int, float]]) -> list[int]:
    return [row for step in steps for row in step]


def error_of(call, *arguments, about=r"hvd\.data", **named) -> str:
    """Returns the text of the ValueError; checks that it is the same on all ranks."""
    with pytest.raises(ValueError, match=about) as caught:
        call(*arguments, **named)
    texts = agree.gather_json("error", str(caught.value))
    assert set(texts) == {texts[0]}
    return texts[0]


def samples(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x, y = random.normal(size=(length, 5)), random.normal(size=(length, 1))
    return (
        x.astype("float32"),
        y.astype("float32"),
        random.uniform(0.5, 2, length).astype("float32"),
    )


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def distributed_model() -> keras.Model:
    model = training.dense_model()
    training.set_weights(model, seed=0)
    model.compile(optimizer=hvd.DistributedOptimizer(momentum()), loss="mse")
    return model


def tuples(dataset: tf.data.Dataset) -> list[tuple[int, ...]]:
    """Returns the x of one pass, by batch."""
    return [tuple(x.numpy().tolist()) for x, *_ in dataset]


def of_all(dataset: tf.data.Dataset) -> list[list[int]]:
    """Returns, by step, the x of all ranks; checks that steps and rows are equally many."""
    everyone = agree.gather_json("of all", tuples(dataset))
    for step in zip(*everyone, strict=True):
        assert len({len(x) for x in step}) == 1
    return [sorted(row for x in step for row in x) for step in zip(*everyone, strict=True)]


LENGTH = 2 * TOGETHER + 3 * SIZE
IN_ORDER = [
    list(range(start, min(start + TOGETHER, LENGTH))) for start in range(0, LENGTH, TOGETHER)
]


def rows_dataset(length: int = LENGTH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(length))
