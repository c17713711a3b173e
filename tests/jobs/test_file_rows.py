"""A training from many files uses each row once in each epoch, though a rank is killed."""

import collections
import re
import sys

import pytest
import tensorflow as tf

FILES, EPOCHS = 200, 3
LENGTHS = [37 * number % 64 for number in range(FILES)]  # some are empty

TRAIN = """
import keras
import tensorflow as tf
import hvd_keras as hvd

hvd.init()
BATCH = 16

def parse(records):
    rows = tf.strings.to_number(records)
    return rows[:, None], rows

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.rows = tf.Variable(tf.zeros(BATCH), trainable=False)

    def call(self, x):
        return self.dense(x / 10_000)

    def train_step(self, batch):
        x, _, weights = batch
        self.rows.assign(tf.where(weights > 0, x[:, 0], -1.0))  # the others fill the last step
        return super().train_step(batch)

class Seen(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if hvd.size() == 3 and hvd.rank() == 1 and (self.epoch, batch) == (1, 23):
            with open("hosts", "w") as file:
                file.write("localhost:2")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        if logs:  # it was trained
            rows = " ".join(str(int(row)) for row in self.model.rows.numpy() if row >= 0)
            with open(f"seen-{hvd.size()}", "a") as file:
                print(self.epoch, batch, rows, file=file)

keras.utils.set_random_seed(1)
model = Model()
model(tf.zeros((1, 1)))
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
files = hvd.data.files("part-*.tfrecord", map=parse)
data = hvd.data.shard(files, batch_size=BATCH, uneven="pad", shuffle=1000)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.Checkpoint("checkpoints", save_freq=5),
    Seen(),
]
model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
"""


@pytest.mark.slow
def test_killed_on_three_ranks_and_finished_on_two(hvdrun) -> None:
    row = 0
    for number, length in enumerate(LENGTHS):
        with tf.io.TFRecordWriter(str(hvdrun.folder / f"part-{number:03d}.tfrecord")) as file:
            for _ in range(length):
                file.write(str(row))
                row += 1
    (hvdrun.folder / "hosts").write_text("localhost:3")
    hosts = ("--host-discovery-script", "cat hosts", "--max-restarts", "1", "--min-np", "2")
    done = hvdrun.run(*hosts, sys.executable, hvdrun.script(TRAIN), timeout=1800)
    assert done.returncode == 0, done.stderr
    (place,) = re.findall(r"continuing from checkpoint-(\d+)-(\d+)", done.stderr)
    assert "Traceback" not in done.stderr  # of what is read ahead
    kept = tuple(map(int, place))
    assert kept in ((1, 15), (1, 20))  # the last, or the one before
    seen = collections.defaultdict(list)
    for size in (2, 3):
        for line in (hvdrun.folder / f"seen-{size}").read_text().splitlines():
            epoch, batch, *rows = map(int, line.split())
            if size == 2 or (epoch, batch) < kept:
                seen[epoch] += rows
    assert [sorted(rows) for _, rows in sorted(seen.items())] == [[*range(sum(LENGTHS))]] * EPOCHS
