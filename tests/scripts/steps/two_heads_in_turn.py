"""A shared trunk with two heads, of which each step trains one, as in multi-task learning.

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
random = np.random.default_rng(11)
x = random.normal(size=(192, 6)).astype("float32")
targets = [x[:, :1] + 1, x[:, 1:2] ** 2]

trunk = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="relu")])
heads = [keras.Sequential([keras.Input((16,)), layers.Dense(1)]) for _ in targets]
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
variables = [v for model in (trunk, *heads) for v in model.trainable_variables]
hvd.broadcast_variables(variables, root_rank=0)

for step in range(len(x) // BATCH):
    rows = slice(step * BATCH + hvd.rank(), (step + 1) * BATCH, hvd.size())
    task = step % 2
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(heads[task](trunk(x[rows])) - targets[task][rows]))
    gradients = tape.gradient(loss, variables)
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    optimizer.build(variables)
    optimizer.apply_gradients(pairs)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *[v.numpy() for v in variables])
