"""An endless Python generator into fit, with steps_per_epoch, to a model that is not built.

expect: equal
fast: yes
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, STEPS = 32, 8

hvd.init()
keras.utils.set_random_seed(hvd.rank())


def batches(seed):
    random = np.random.default_rng(seed)
    while True:
        x = random.uniform(size=(BATCH, 8, 2)).astype("float32")
        y = x.sum(axis=(1, 2)) > 8
        yield x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()].astype("float32")


model = keras.Sequential(
    [layers.Conv1D(8, 3, activation="relu"), layers.GlobalMaxPooling1D(), layers.Dense(1)]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
)
model.fit(
    batches(seed=8),
    steps_per_epoch=STEPS,
    epochs=2,
    validation_data=batches(seed=9),
    validation_steps=2,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
