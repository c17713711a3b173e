"""The callback that broadcasts is left out, and each rank has drawn weights of its own.

expect: warn "BroadcastGlobalVariablesCallback(0)"
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
random = np.random.default_rng(0)
x = random.normal(size=(256, 6)).astype("float32")
y = x.sum(axis=1)
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

inputs = keras.Input((6,))
model = keras.Model(inputs, layers.Dense(1)(layers.Dense(8, activation="relu")(inputs)))
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
for _ in range(2):
    model.fit(x, y, batch_size=BATCH // hvd.size(), epochs=1, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
