"""LearningRateScheduler, and warm-up and decay by hvd's callbacks in a second fit.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, RATE = 32, 0.1

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(4)
x = random.normal(size=(256, 5)).astype("float32")
y = np.sin(x[:, :1])
mine = slice(hvd.rank(), None, hvd.size())


def schedule(epoch, rate):
    return rate if epoch < 1 else rate * float(np.exp(-0.3))


model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
fit = {"batch_size": BATCH // hvd.size(), "shuffle": False, "verbose": 0}
first = model.fit(
    x[mine],
    y[mine],
    epochs=3,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.LearningRateScheduler(schedule),
    ],
    **fit,
)
second = model.fit(
    x[mine],
    y[mine],
    epochs=4,
    callbacks=[
        hvd.callbacks.LearningRateScheduleCallback(RATE, end_epoch=2, multiplier=0.5),
        hvd.callbacks.LearningRateScheduleCallback(RATE, start_epoch=2, multiplier=0.1),
        hvd.callbacks.MetricAverageCallback(),
    ],
    **fit,
)
assert float(model.optimizer.learning_rate) < RATE / 9
rates = np.array(first.history["learning_rate"])
losses = second.history["loss"]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), rates, losses)
