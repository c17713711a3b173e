"""An optimizer that averages weights, validated and saved with the averages.

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
x = random.normal(size=(256, 6)).astype("float32")
y = x @ random.normal(size=(6, 2)).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(2)])
optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    validation_split=0.25,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.SwapEMAWeights(),
    ],
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
