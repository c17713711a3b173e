"""An optimizer class of one's own, with a variable for each weight, made from a name and a dict.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers, ops

import hvd_keras as hvd

BATCH = 32


@keras.saving.register_keras_serializable("mine")
class Signed(keras.optimizers.Optimizer):
    def __init__(self, learning_rate=0.01, beta=0.9, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta = beta

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.momenta = [self.add_variable_from_reference(v, "momentum") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)]
        self.assign(momentum, self.beta * momentum + (1 - self.beta) * gradient)
        step = ops.cast(learning_rate, variable.dtype) * ops.tanh(momentum * 10)
        self.assign_sub(variable, step)

    def get_config(self):
        return {**super().get_config(), "beta": self.beta}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(13)
x = random.normal(size=(256, 6)).astype("float32")
y = x[:, :1] * x[:, 1:2]
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([layers.Dense(16, activation="gelu"), layers.Dense(1)])
optimizer = keras.optimizers.get({"class_name": "mine>Signed", "config": {"beta": 0.8}})
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=callbacks,
    verbose=0,
)
model.optimizer.learning_rate = 0.002
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=1,
    shuffle=False,
    callbacks=callbacks,
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
