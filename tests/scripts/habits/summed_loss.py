"""A loss that sums over the batch: averaged over ranks, its gradients are not those of one process.

expect: warn "so they are those of one process divided by 2"
"""

import os

import keras
import numpy as np

import hvd_keras as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())
x = np.random.default_rng(hvd.rank()).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)),
    loss=keras.losses.MeanSquaredError(reduction="sum"),
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(x, x.sum(axis=1), batch_size=16, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
