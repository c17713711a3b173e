"""ModelCheckpoint keeps the best model in fit; afterwards every rank loads it.

expect: equal
fast: yes
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(0)
x = random.normal(size=(256, 8)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())

inputs = keras.Input((8,))
hidden = layers.Dense(512, activation="relu")(inputs)
model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss="binary_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    validation_data=(x[:64], y[:64]),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
    ],
    verbose=0,
)
best = keras.models.load_model("best.keras")
loss, accuracy = best.evaluate(x, y, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *best.get_weights(), loss)
