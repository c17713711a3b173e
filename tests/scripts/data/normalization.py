"""Normalization adapted to each rank's share of the data, as a reader of the four lines does.

expect: differ-ok
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(0)
features = random.normal([5, -3, 100], [2, 1, 30], size=(256, 3)).astype("float32")
labels = (features[:, :1] / 10 + features[:, 2:] / 100).astype("float32")
x, y = features[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]

normalize = layers.Normalization()
normalize.adapt(x)
model = keras.Sequential([normalize, layers.Dense(16, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
model.fit(
    x,
    y,
    batch_size=BATCH // hvd.size(),
    epochs=2,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
# What the model computes is as equal as its weights.
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), model.predict(features[:8]))
