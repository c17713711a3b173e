"""compile(run_eagerly=True), a model without Input, a train_step that keeps what it has seen.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 32
norms = []


class Model(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        norms.append(float(tf.linalg.global_norm(gradients)) if tf.executing_eagerly() else None)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(9)
x = random.normal(size=(192, 8)).astype("float32")
y = x.max(axis=1, keepdims=True)
mine = slice(hvd.rank(), None, hvd.size())

model = Model([layers.Dense(16, activation="relu"), layers.Dense(1)])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", run_eagerly=True
)
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
assert norms[-1] is not None
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
