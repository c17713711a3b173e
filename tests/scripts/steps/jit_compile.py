"""compile(jit_compile=True), a Sequential without Input, several steps in one execution.

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
random = np.random.default_rng(10)
x = random.normal(size=(256, 8)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(3)])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    jit_compile=True,
    steps_per_execution=4,
)
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
