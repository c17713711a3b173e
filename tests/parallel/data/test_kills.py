"""A training that is interrupted on 2, 3 and 1 ranks in turn uses each row once in each epoch."""

import collections
import itertools
import pathlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import data
from hvd_keras.runtime import agree, log
from tests.harness.shards import Batches

pytestmark = pytest.mark.ranks(3)
SLOW = pytest.mark.slow
ROWS, BATCH = 61, 4


class Model(keras.Model):
    """Writes down what it is trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.rows = keras.layers.Dense(1), []

    def call(self, x):
        return self.dense(tf.cast(x[:, None], tf.float32) / ROWS)

    def train_step(self, batch):
        x, _, weights = batch
        self.rows = x.numpy()[weights.numpy() > 0].tolist()
        return super().train_step(batch)


class Killed(keras.callbacks.Callback):
    """Ends ``fit`` after some steps, and writes down the rows of each."""

    def __init__(self, left: int | None) -> None:
        super().__init__()
        self.left, self.epoch, self.seen = left, 0, []

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None) -> None:
        if not logs:
            return  # it was not trained
        self.seen.append((self.epoch, batch, self.model.rows))
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise KeyboardInterrupt


class Checkpoint(hvd.callbacks.Checkpoint):
    last = (0, 0)  # what was saved in this life

    def _save(self, epoch: int, batch: int) -> None:
        super()._save(epoch, batch)
        self.last = (epoch, batch)


def source(kind: str, directory: pathlib.Path):
    x = np.arange(ROWS)
    if kind == "arrays":
        return (x, x)
    if kind == "batches":
        return Batches(x, x)
    if kind != "files":
        rows = tf.data.Dataset.from_tensor_slices(x).filter(lambda x: x >= 0)
        rows = rows.interleave(tf.data.Dataset.from_tensors, 3, 2, 2, deterministic=True)
        return rows.shuffle(9, seed=3).map(lambda x: (x, x), tf.data.AUTOTUNE)
    for number, rows in enumerate(np.split(x, [3, 20, 21])):
        path = directory / f"part-{number}"
        if hvd.rank() == 0 and not path.exists():
            with tf.io.TFRecordWriter(str(path)) as file:
                for row in rows:
                    file.write(str(row))
    hvd.barrier()

    def parse(records):
        numbers = tf.strings.to_number(records, tf.int64)
        return numbers, numbers

    return data.files(str(directory / "part-*"), map=parse)


def live(
    rows, directory: pathlib.Path, ranks, epochs: int, kill: int | None, kind: str = ""
) -> list:
    """Trains on some ranks, until it is killed; returns what the checkpoints have of it."""
    keras.utils.set_random_seed(1)  # the same on all ranks
    model = Model()
    model(tf.zeros(1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), process_set=ranks)
    model.compile(optimizer, "mse", run_eagerly=True)
    size = {} if isinstance(rows, Batches) else {"batch_size": BATCH}
    batches = data.shard(rows, **size, uneven="pad", shuffle=20, process_set=ranks)
    steps = {"steps_per_epoch": len(batches)} if kind == "repeated" else {}
    if "repeated" in kind:
        batches = batches.repeat(None if steps else 2).prefetch(3)
    checkpoint = Checkpoint(directory / "checkpoints", save_freq=2, process_set=ranks)
    killed = Killed(kill)
    try:
        model.fit(batches, epochs=epochs, verbose=0, callbacks=[checkpoint, killed], **steps)
    except KeyboardInterrupt:
        assert kill is not None
    return [(epoch, seen) for epoch, batch, seen in killed.seen if (epoch, batch) < checkpoint.last]


CASES = [("files", 4), ("arrays", 4), ("dataset", 4), ("repeated", 4), ("repeated twice", 4)]
MANY = [
    *[("files", 50), ("batches", 4), ("dataset", 50), ("repeated twice", 12), ("repeated", 50)],
]
MANY = [pytest.param(*case, marks=SLOW) for case in MANY]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "kills"), [*CASES, *MANY])
def test_each_row_once_in_each_epoch(kind: str, kills: int, directory: pathlib.Path) -> None:
    generator, seen = random.Random(1), collections.defaultdict(list)
    sets = [hvd.add_process_set([0, 1]), hvd.global_process_set, hvd.add_process_set([0])]
    epochs = kills // 2
    for life in range(kills + 1):
        keras.utils.set_random_seed(1)
        rows = source(kind, directory)  # with the shuffle of a new process
        # The steps that an epoch of repeated data lacks are those of as many ranks.
        ranks = sets[0 if "repeated" in kind else life // 2 % 3]
        # Soon enough that some epochs are interrupted twice.
        kill = generator.randint(3, 5) if life < kills else None
        mine = live(rows, directory, ranks, epochs, kill, kind) if ranks.included() else []
        for epoch, numbers in itertools.chain(*agree.gather_json("kills", mine)):
            seen[epoch] += numbers
    expected = sorted([*range(ROWS)] * (2 if "twice" in kind else 1))
    assert [sorted(numbers) for _, numbers in sorted(seen.items())] == [expected] * epochs


@pytest.mark.parametrize("kind", ["files", "dataset"])
def test_what_a_restart_reads_again_is_told(kind: str, directory: pathlib.Path, caplog) -> None:
    """Before training; a sharded dataset runs on every rank, from its beginning."""
    log.logger.addHandler(caplog.handler)
    live(source(kind, directory), directory, hvd.global_process_set, 1, 3)
    log.logger.removeHandler(caplog.handler)
    told = [line for line in caplog.messages if "what is before that again" in line]
    assert len(told) == (kind == "dataset" and hvd.rank() == 0)
