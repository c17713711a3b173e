"""Mixed precision with bfloat16, functional.

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
keras.mixed_precision.set_global_policy("mixed_bfloat16")
random = np.random.default_rng(7)
x = random.normal(size=(320, 20)).astype("float32")
y = (x.sum(axis=1) > 0).astype(int)

inputs = keras.Input((20,))
hidden = layers.Dense(32, activation="relu")(inputs)
outputs = layers.Dense(2, activation="softmax", dtype="float32")(hidden)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
mine = slice(hvd.rank(), None, hvd.size())
history = model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=4,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
)
assert history.history["loss"][-1] < history.history["loss"][0] - 0.1, history.history
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
