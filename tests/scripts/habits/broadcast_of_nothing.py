"""A loop that broadcasts before the model has variables, so that the call does nothing.

expect: warn "broadcast_variables"
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
random = np.random.default_rng(0)
x = random.normal(size=(256, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
mine = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(BATCH // hvd.size())

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.02)
hvd.broadcast_variables(model.variables, root_rank=0)
for features, labels in dataset:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(features) - labels))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
