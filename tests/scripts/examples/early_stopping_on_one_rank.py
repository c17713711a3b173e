"""Rank 0 alone stops early, as a script may that gives all its callbacks to rank 0.

expect: error "the ranks wait for different collectives"
env: HVD_MISMATCH_SECONDS=3
"""

import os

import keras
import numpy as np

import hvd_keras as hvd

hvd.init()
x = np.random.default_rng(14).normal(size=(256, 6)).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100.0))
model.fit(x[mine], x[mine, :1], epochs=6, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
