"""hvd.data.shard of a dataset that is batched already: rows or an error, never batches of batches.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 16

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(17)
x = random.normal(size=(128, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

try:
    train = hvd.data.shard(dataset, batch_size=BATCH // hvd.size(), shuffle=False)
except ValueError as error:  # the line that it should tell
    if "unbatch()" not in str(error):
        raise
    train = hvd.data.shard(dataset.unbatch(), batch_size=BATCH // hvd.size(), shuffle=False)

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.02)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(train, epochs=2, shuffle=False, callbacks=callbacks, verbose=0)
assert int(model.optimizer.iterations) == 2 * len(x) // BATCH
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
