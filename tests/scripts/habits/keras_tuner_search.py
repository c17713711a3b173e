"""KerasTuner on every rank, with the hvd lines in build_model: each rank draws other trials.

expect: error "KerasTuner"
needs: keras_tuner
"""

import os

import keras
import keras_tuner
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
random = np.random.default_rng(0)
x = random.normal(size=(128, 6)).astype("float32")
y = x.sum(axis=1)
mine = slice(hvd.rank(), None, hvd.size())


def build_model(hp):
    units = hp.Int("units", 8, 2000)  # hardly ever equal
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(units, activation="relu"), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(hp.Float("rate", 1e-3, 1e-1, sampling="log"))
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
    return model


tuner = keras_tuner.RandomSearch(
    build_model, objective="val_loss", max_trials=2, directory=f"search-{hvd.rank()}"
)
tuner.search(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=1,
    validation_data=(x[mine], y[mine]),
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
best = tuner.get_best_models(1)[0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *best.get_weights())
