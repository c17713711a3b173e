"""Three of the four lines: the optimizer is not wrapped.

expect: warn "hvd.DistributedOptimizer"
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
x = random.normal(size=(256, 6)).astype("float32")
y = x.sum(axis=1)
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
for _ in range(2):
    model.fit(x, y, batch_size=BATCH // hvd.size(), epochs=1, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
