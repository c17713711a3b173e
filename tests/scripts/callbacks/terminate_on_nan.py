"""A row that only one rank has is not a number: TerminateOnNaN ends all after the same batch.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, BAD = 32, 165  # in the sixth batch, and on the second of two ranks

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(12)
x = random.normal(size=(256, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
x[BAD] = np.nan
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.TerminateOnNaN(),
    ],
    verbose=0,
)
steps = int(model.optimizer.iterations)
assert steps == BAD // BATCH + 1
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", steps)
