"""Debugging with run_eagerly=True: call looks at values, which a traced function does not have.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, activation="relu")
        self.out = layers.Dense(1)

    def call(self, x):
        x = self.hidden(x)
        assert np.isfinite(x.numpy()).all()  # only eagerly
        return self.out(x)


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(9)
x = random.normal(size=(192, 8)).astype("float32")
y = x.max(axis=1, keepdims=True)
mine = slice(hvd.rank(), None, hvd.size())

model = Net()
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse", run_eagerly=True
)
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
