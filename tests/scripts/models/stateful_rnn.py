"""A stateful LSTM that goes on where the last batch ended, and is reset after each epoch.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

SERIES = 8  # that many go on side by side, a row each; each rank follows its share of them
STEPS, WINDOWS = 5, 6

hvd.init()
keras.utils.set_random_seed(hvd.rank())
time = np.arange(STEPS * WINDOWS + 1)[None] + np.arange(SERIES)[:, None] * 3
waves = np.sin(time / 4).astype("float32")[hvd.rank() :: hvd.size(), :, None]
rows = len(waves)
windows = [slice(i * STEPS, (i + 1) * STEPS) for i in range(WINDOWS)]
x = np.concatenate([waves[:, window] for window in windows])
y = np.concatenate([waves[:, window.stop] for window in windows])

model = keras.Sequential(
    [
        keras.Input(batch_shape=(rows, STEPS, 1)),
        layers.LSTM(8, stateful=True),
        layers.Dense(1),
    ]
)
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
for _ in range(3):
    model.fit(x, y, batch_size=rows, epochs=1, shuffle=False, callbacks=callbacks, verbose=0)
    model.layers[0].reset_state()
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
