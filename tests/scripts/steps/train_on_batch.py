"""A loop of train_on_batch, as GAN and word2vec scripts have it: there is no fit for a callback.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, STEPS = 32, 15

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(7)
x = random.normal(size=(256, 8)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("float32")

model = keras.Sequential(
    [keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(1, "sigmoid")]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss="binary_crossentropy",
    metrics=["accuracy"],
)
hvd.broadcast_variables(model.variables, root_rank=0)
for step in range(STEPS):
    rows = np.random.default_rng(step).integers(0, len(x), BATCH)  # the same on all ranks
    rows = rows[hvd.rank() :: hvd.size()]
    logs = model.train_on_batch(x[rows], y[rows], return_dict=True)
    if step % 5 == 0 and hvd.rank() == 0:
        print(step, logs)
loss = model.evaluate(x, y, verbose=0)[0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), loss)
