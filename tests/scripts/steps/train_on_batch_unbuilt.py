"""train_on_batch with a model that its first batch builds; broadcast after it, as with a tape.

expect: differ-ok
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, STEPS = 32, 12

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(8)
x = random.normal(size=(STEPS * BATCH, 5)).astype("float32")
y = x.sum(axis=1, keepdims=True)

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.02)), loss="mse")
for step in range(STEPS):
    rows = slice(step * BATCH + hvd.rank(), (step + 1) * BATCH, hvd.size())
    model.train_on_batch(x[rows], y[rows])
    if step == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(model.optimizer.variables, root_rank=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
