"""EarlyStopping with restore_best_weights, and ReduceLROnPlateau, on a model that overfits.

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
random = np.random.default_rng(1)
x = random.normal(size=(96, 10)).astype("float32")
y = random.integers(0, 2, size=96).astype("float32")  # there is nothing to learn
mine = slice(hvd.rank(), 64, hvd.size())

model = keras.Sequential([layers.Dense(32, activation="tanh"), layers.Dense(1, "sigmoid")])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.3)), loss="binary_crossentropy"
)
history = model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=20,
    shuffle=False,
    validation_data=(x[64:], y[64:]),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1),
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
    ],
    verbose=0,
)
epochs = len(history.epoch)
assert epochs < 20
rate = float(model.optimizer.learning_rate)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), epochs, rate)
