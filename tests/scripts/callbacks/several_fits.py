"""fit after fit: the same model with more data, other batches, and weights that were set.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(9)
x = random.normal(size=(256, 6)).astype("float32")
y = np.tanh(x[:, :1] - x[:, 1:2])
broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")


def fit(rows, batch, **options):
    mine = slice(rows.start + hvd.rank(), rows.stop, hvd.size())
    options = {"shuffle": False, "verbose": 0, "callbacks": [broadcast]} | options
    return model.fit(x[mine], y[mine], batch_size=batch // hvd.size(), **options)


fit(slice(0, 128), BATCH)
fit(slice(128, 256), 2 * BATCH, epochs=2)
fit(slice(0, 256), BATCH, initial_epoch=2, epochs=4, validation_data=(x[:32], y[:32]))
# Rank 0 reads weights from somewhere; the others get them when training begins.
if hvd.rank() == 0:
    model.set_weights([w * 0.5 for w in model.get_weights()])
fit(slice(0, 256), BATCH)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
