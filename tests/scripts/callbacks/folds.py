"""Cross-validation: one list of callbacks, made once, for the model of every fold.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, FOLDS = 16, 3

hvd.init()
random = np.random.default_rng(8)
x = random.normal(size=(288, 6)).astype("float32")
y = x[:, :1] ** 2 + x[:, 1:2]
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]


def make_model():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
    )
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    return model


weights, scores = [], []
for fold in range(FOLDS):
    test = np.arange(len(x)) % FOLDS == fold
    keras.utils.set_random_seed(fold + 100 * hvd.rank())
    model = make_model()
    model.fit(
        x[~test][hvd.rank() :: hvd.size()],
        y[~test][hvd.rank() :: hvd.size()],
        batch_size=BATCH // hvd.size(),
        epochs=1,
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    )
    scores.append(model.evaluate(x[test], y[test], verbose=0))
    weights += model.get_weights()
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *weights, scores)
