"""A script for several GPUs of one process, whose author forgot to remove the strategy.

expect: error "Remove `with strategy.scope():`"
"""

import os

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

hvd.init()
strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x = np.random.default_rng(hvd.rank()).normal(size=(64, 4))
model.fit(
    x,
    x.sum(axis=1),
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
