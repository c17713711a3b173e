"""hvd.callbacks.Checkpoint around a subclassed model; a second model goes on from its folder.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32


class Regressor(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, activation="relu")
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


hvd.init()
random = np.random.default_rng(7)
x = random.normal(size=(256, 5)).astype("float32")
y = x[:, :1] * x[:, 1:2]
mine = slice(hvd.rank(), None, hvd.size())


def train(seed, epochs):
    keras.utils.set_random_seed(seed)
    model = Regressor()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    checkpoint = hvd.callbacks.Checkpoint("checkpoints")
    model.fit(
        x[mine],
        y[mine],
        batch_size=BATCH // hvd.size(),
        initial_epoch=checkpoint.initial_epoch,
        epochs=epochs,
        shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), checkpoint],
        verbose=0,
    )
    return model


train(seed=hvd.rank(), epochs=2)
model = train(seed=1000 + hvd.rank(), epochs=4)
assert int(model.optimizer.iterations) == 4 * len(x) // BATCH
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
