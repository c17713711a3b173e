"""Gradients are accumulated over four batches; averaged weights are swapped in for validation.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 16

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(13)
x = random.normal(size=(256, 6)).astype("float32")
y = np.cos(x[:, :1])
mine = slice(hvd.rank(), None, hvd.size())

optimizer = keras.optimizers.SGD(
    0.1, momentum=0.9, use_ema=True, ema_momentum=0.8, gradient_accumulation_steps=4
)
model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
history = model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    validation_data=(x[:64], y[:64]),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.SwapEMAWeights(),
    ],
    verbose=0,
)
losses = history.history["val_loss"]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), losses)
