"""A loss that sums over the batch: its averaged gradients are those of one process all the same.

expect: equal
"""

import os

import keras
import numpy as np

import hvd_keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(3).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)),
    loss=keras.losses.MeanSquaredError(reduction="sum"),
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
data = hvd.data.shard((x, x.sum(axis=1)), batch_size=16 // hvd.size())
model.fit(data, shuffle=False, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
