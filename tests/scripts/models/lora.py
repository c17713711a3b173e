"""A trained model is tuned with LoRA: only the small matrices of its layers are trained.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(8)
x = random.normal(size=(192, 10)).astype("float32")
tasks = [np.tanh(x @ random.normal(size=(10, 4))).astype("float32") for _ in range(2)]
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([keras.Input((10,)), layers.Dense(32, activation="relu"), layers.Dense(4)])


def train(y):
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(
        x[mine],
        y[mine],
        batch_size=BATCH // hvd.size(),
        epochs=2,
        shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        verbose=0,
    )


train(tasks[0])
for layer in model.layers:
    layer.enable_lora(rank=2)
assert len(model.trainable_variables) == 6  # two matrices and a bias in each layer
train(tasks[1])
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
