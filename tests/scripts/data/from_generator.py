"""tf.data from a generator, batched by hand, of unknown length; every rank has its share of it.

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


def samples():
    random = np.random.default_rng(7)
    for _ in range(160):
        x = random.normal(size=(4,)).astype("float32")
        yield x, np.prod(x[:2], keepdims=True)


signature = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32))
dataset = tf.data.Dataset.from_generator(samples, output_signature=signature)
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())

inputs = keras.Input((4,))
outputs = layers.Dense(1)(layers.Dense(16, activation="relu")(inputs))
model = keras.Model(inputs, outputs)
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
history = model.fit(dataset, epochs=3, callbacks=callbacks, verbose=0)
loss = np.array(history.history["loss"])
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), loss)
