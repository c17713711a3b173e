"""A training that goes on after restarts, and tells what it has seen and where it ends.

Arguments: a folder for the checkpoints, epochs, and seconds that a step takes at least. Each rank
appends to the file "seen" in the current folder the rows of every batch; the label of a row is its
number. The last line of rank 0's output tells the digest of the end.
"""

import hashlib
import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from hvd_keras.callbacks import VerifyWeights

import hvd_keras as hvd

ROWS, BATCH, EVERY = 240, 4, 2
RATE = 1e-3


class Seen(keras.callbacks.Callback):
    """Writes down what was trained and with which learning rate."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None) -> None:
        time.sleep(self.pause)
        if logs:  # what was left out has none
            rate = float(self.model.optimizer.learning_rate)
            rows = ",".join(str(int(row)) for row in self.model.rows.numpy())
            with open("seen", "a") as file:
                print(self.epoch, batch, hvd.rank(), hvd.size(), f"{rate:.6g}", rows, file=file)
        if hvd.rank() == 0:
            print(f"epoch {self.epoch} batch {batch}", flush=True)


class Model(keras.Model):
    """Keeps the numbers of the rows of its last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(8, activation="tanh")
        self.drop = keras.layers.Dropout(0.2)
        self.last = keras.layers.Dense(1)
        self.rows = tf.Variable(tf.zeros(BATCH), trainable=False)

    def call(self, x, training=False):
        return self.last(self.drop(self.dense(x), training=training))

    def train_step(self, data):
        self.rows.assign(tf.reshape(data[1], [-1]))
        x, y = data
        return super().train_step((x, y / ROWS))


def main() -> None:
    """Trains."""
    folder, epochs, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    hvd.init()
    keras.utils.set_random_seed(7)
    model = Model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(RATE * hvd.size()))
    model.compile(optimizer=optimizer, loss="mse")
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 6)).astype("float32"), np.arange(ROWS, dtype="float32")
    model(x[:BATCH])
    checkpoint = hvd.callbacks.Checkpoint(folder, save_freq=EVERY)
    data = hvd.data.shard((x, y), batch_size=BATCH)
    broadcast, verify = hvd.callbacks.BroadcastGlobalVariablesCallback(0), VerifyWeights(EVERY)
    callbacks = [broadcast, verify, checkpoint, Seen(pause)]
    print("begins with epoch", checkpoint.initial_epoch, "on", os.uname().nodename, flush=True)
    model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0)
    state = [np.asarray(v).tobytes() for v in (*model.weights, *model.optimizer.variables)]
    if hvd.rank() == 0:
        print("ends with", hashlib.sha256(b"".join(state)).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
