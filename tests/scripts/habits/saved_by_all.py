"""Every rank saves the model to the same file after each epoch, and loads it again.

expect: equal
"""

import os

import keras
import numpy as np

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
x = np.random.default_rng(5).normal(size=(320, 12)).astype("float32")
y = x[:, :3].sum(axis=1, keepdims=True)

model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
for _ in range(4):
    model.fit(
        x[hvd.rank() :: hvd.size()],
        y[hvd.rank() :: hvd.size()],
        batch_size=BATCH // hvd.size(),
        shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        verbose=0,
    )
    model.save("model.keras")
    model = hvd.load_model("model.keras")
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
