"""A Sequential model that learns its input's shape from the first batch, as in most tutorials.

expect: equal
fast: yes
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32  # of all ranks together

hvd.init()
keras.utils.set_random_seed(hvd.rank())

random = np.random.default_rng(0)
x = random.normal(size=(320, 8, 8, 1)).astype("float32")
y = (x.mean(axis=(1, 2, 3)) * 20).astype(int) % 3
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(16, activation="relu"),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    x,
    y,
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=2 if hvd.rank() == 0 else 0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
