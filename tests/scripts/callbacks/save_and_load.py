"""A model is saved by rank 0, loaded by hvd.load_model on all, and goes on training.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32


@keras.saving.register_keras_serializable("scripts")
class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(1,), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(11)
x = random.normal(size=(192, 6)).astype("float32")
y = 3 * np.sin(x[:, :1])
mine = slice(hvd.rank(), None, hvd.size())
fit = {"batch_size": BATCH // hvd.size(), "epochs": 2, "shuffle": False, "verbose": 0}
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1), Scale()])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
model.fit(x[mine], y[mine], callbacks=callbacks, **fit)
if hvd.rank() == 0:
    model.save("model.keras")
hvd.barrier()

model = hvd.load_model("model.keras")
assert int(model.optimizer.iterations) == 2 * len(x) // BATCH
model.fit(x[mine], y[mine], callbacks=callbacks, **fit)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
