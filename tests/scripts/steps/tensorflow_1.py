"""A session script of TensorFlow 1: placeholders, a feed, a hook, a monitored session.

expect: equal
"""

import os

import numpy as np
import tensorflow.compat.v1 as tf

import hvd_keras as hvd

BATCH = 32
tf.disable_v2_behavior()

hvd.init()
tf.set_random_seed(hvd.rank())
random = np.random.default_rng(12)
data = random.normal(size=(320, 4)).astype("float32")
answers = (data @ [[1.0], [2.0], [-1.0], [0.5]] + 0.3).astype("float32")


def batches():
    while True:
        for start in range(0, len(data), BATCH):
            rows = slice(start + hvd.rank(), start + BATCH, hvd.size())
            yield data[rows], answers[rows]


x = tf.placeholder(tf.float32, [None, 4])
y = tf.placeholder(tf.float32, [None, 1])
hidden = tf.get_variable("hidden", [4, 8])
kernel = tf.get_variable("kernel", [8, 1])
bias = tf.get_variable("bias", [1], initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.square(tf.tanh(x @ hidden) @ kernel + bias - y))
global_step = tf.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.05, 0.9))
train_op = optimizer.minimize(loss, global_step=global_step)

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.train.StopAtStepHook(last_step=20),
    tf.train.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=10),
]
checkpoint_dir = "./checkpoints" if hvd.rank() == 0 else None
feed = batches()
with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks) as session:
    while not session.should_stop():
        features, labels = next(feed)
        weights = session.run([train_op, hidden, kernel, bias], {x: features, y: labels})[1:]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *weights)
