"""KerasTuner with one seed for all ranks: they try the same, and decide by averaged metrics.

expect: equal
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
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(0)
x = random.normal(size=(128, 6)).astype("float32")
y = x.sum(axis=1)
mine = slice(hvd.rank(), None, hvd.size())


class Regression(keras_tuner.HyperModel):
    def build(self, hp):
        units = hp.Choice("units", [4, 8, 16, 32])
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(units, activation="relu"), layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(hp.Float("rate", 1e-3, 1e-1, sampling="log"))
        model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        return model

    def fit(self, hp, model, *args, callbacks=None, **kwargs):
        average = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        return model.fit(*args, callbacks=average + (callbacks or []), **kwargs)


tuner = keras_tuner.RandomSearch(
    Regression(),
    objective="val_loss",
    max_trials=2,
    seed=42,
    directory=f"search-{hvd.rank()}",  # a search of its own for each rank, all alike
)
tuner.search(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    validation_data=(x[mine], y[mine]),
    verbose=0,
)
rate = tuner.get_best_hyperparameters(1)[0].values["rate"]
best = tuner.get_best_models(1)[0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *best.get_weights(), rate)
