"""An image is trained, no model: a tape, a tf.Variable and a rate that decays.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

hvd.init()
keras.utils.set_random_seed(0)
network = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, activation="relu")])
random = np.random.default_rng(3)
styles = random.uniform(size=(4, 8, 8, 3)).astype("float32")[hvd.rank() :: hvd.size()]

optimizer = keras.optimizers.SGD(
    keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=4, decay_rate=0.9)
)
image = tf.Variable(random.uniform(size=(1, 8, 8, 3)).astype("float32") + hvd.rank())
hvd.broadcast_variables([image], root_rank=0)


@tf.function
def loss_and_grads(image):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(network(image) - network(styles)))
    return loss, hvd.DistributedGradientTape(tape).gradient(loss, image)


for _ in range(12):
    loss, grads = loss_and_grads(image)
    optimizer.apply_gradients([(grads, image)])
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", image.numpy())
