"""Layers are frozen and opened between fits; compiled anew each time, batch statistics in use.

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
random = np.random.default_rng(10)
x = random.normal(size=(192, 8)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
mine = slice(hvd.rank(), None, hvd.size())

backbone = keras.Sequential(
    [
        layers.Dense(16),
        layers.BatchNormalization(synchronized=True),
        layers.ReLU(),
        layers.Dense(8, activation="relu"),
    ]
)
model = keras.Sequential([backbone, layers.Dense(3)])


def train(rate):
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    batch = BATCH // hvd.size()
    model.fit(x[mine], y[mine], batch, epochs=2, shuffle=False, callbacks=callbacks, verbose=0)


backbone.trainable = False
train(0.01)
backbone.trainable = True
for layer in backbone.layers[:-1]:
    layer.trainable = isinstance(layer, layers.BatchNormalization)
train(0.001)
backbone.trainable = True
train(0.001)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
