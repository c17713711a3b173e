"""Weight constraints, regularizers, and an optimizer with gradient and weight clipping by hand.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32


class ClipWeights(keras.constraints.Constraint):
    def __init__(self, limit):
        self.limit = limit

    def __call__(self, w):
        return keras.ops.clip(w, -self.limit, self.limit)


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(10)
x = random.normal(size=(256, 6)).astype("float32")
y = (x @ [[5.0], [-4.0], [3.0], [-2.0], [1.0], [0.0]]).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential(
    [
        layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(1.0), activation="relu"),
        layers.Dense(8, kernel_constraint="non_neg", activity_regularizer="l2"),
        layers.Dense(1, kernel_constraint=ClipWeights(0.3), kernel_regularizer="l1"),
    ]
)
optimizer = keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True, clipvalue=0.5)
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=keras.losses.Huber())
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
assert np.abs(model.layers[-1].kernel).max() <= 0.3
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
