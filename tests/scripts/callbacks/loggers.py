"""CSVLogger and TensorBoard, and a ModelCheckpoint of weights every few batches.

expect: equal
needs: tensorboard
"""

import csv
import glob
import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(2)
x = random.normal(size=(256, 8)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(3)])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("logs", histogram_freq=1, update_freq=4),
        keras.callbacks.ModelCheckpoint(
            "weights-{epoch}.weights.h5", save_weights_only=True, save_freq=4
        ),
    ],
    verbose=0,
)
with open("log.csv") as file:  # every rank reads what rank 0 has written
    rows = list(csv.DictReader(file))
assert [row["epoch"] for row in rows] == ["0", "1"]
assert glob.glob("logs/train/events*")
model.load_weights("weights-2.weights.h5")
losses = [float(row["loss"]) for row in rows]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), losses)
