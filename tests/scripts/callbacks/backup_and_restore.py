"""BackupAndRestore is refused for several ranks, with the name of what takes its place.

expect: error "hvd.callbacks.Checkpoint"
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(6)
x = random.normal(size=(128, 5)).astype("float32")
y = x.sum(axis=1)
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.BackupAndRestore("backup"),
    ],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
