"""A model quantized to int8 goes on training with LoRA, whose matrices alone are trained.

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
random = np.random.default_rng(9)
x = random.normal(size=(128, 16)).astype("float32")
y = np.tanh(x @ random.normal(size=(16, 3))).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(3)])
model.quantize("int8")
for layer in model.layers:
    layer.enable_lora(4)

model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
history = model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
assert history.history["loss"][-1] < history.history["loss"][0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
