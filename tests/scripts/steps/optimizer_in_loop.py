"""A loop in a tf.function over a dataset, with the distributed optimizer instead of the tape.

It clips the gradients of each rank.

expect: warn "gradients are changed before they are averaged over the ranks"
"""

import os

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(6)
x = random.normal(size=(256, 6)).astype("float32")
y = x[:, :1] * x[:, 1:2]
mine = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(BATCH // hvd.size())

model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.build((None, 6))
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adagrad(0.05))
hvd.broadcast_variables(model.variables, root_rank=0)


@tf.function
def train_epoch():
    total = 0.0
    for images, labels in dataset:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(labels - model(images, training=True)))
            loss += 1e-3 * tf.add_n([tf.nn.l2_loss(w) for w in model.trainable_weights])
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 100.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        total += loss
    return total


losses = [float(train_epoch()) for _ in range(3)]
assert losses[-1] < losses[0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
