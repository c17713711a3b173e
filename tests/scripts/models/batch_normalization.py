"""Batch normalisation over the batches of all ranks, in a model that nothing has built.

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
random = np.random.default_rng(6)
x = (random.normal(size=(192, 10)) * 3 + 1).astype("float32")
y = x[:, :1] - 2 * x[:, 1:2]

model = keras.Sequential(
    [
        layers.Dense(16, use_bias=False),
        hvd.SyncBatchNormalization(),
        layers.Activation("relu"),
        layers.Dense(8, use_bias=False),
        layers.BatchNormalization(synchronized=True),
        layers.ReLU(),
        layers.Dense(1),
    ]
)
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.005)), loss="mse")
mine = slice(hvd.rank(), None, hvd.size())
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
