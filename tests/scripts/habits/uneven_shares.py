"""Rows shared out by hand, of which rank 0 gets a batch more: told at once, not after minutes.

expect: error "hvd.data"
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 16

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(0)
x = random.normal(size=(257, 6)).astype("float32")
y = x.sum(axis=1)

model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=BATCH,
    epochs=2,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
