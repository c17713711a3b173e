"""hvd.data.shard of rows that do not divide, to a train_step that unpacks x, y = data.

expect: differ-ok
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 32


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
x = np.random.default_rng(16).normal(size=(1001, 8)).astype("float32")
y = x[:, :1] ** 2

inputs = keras.Input((8,))
outputs = layers.Dense(1)(layers.Dense(16, activation="relu")(inputs))
model = CustomModel(inputs, outputs)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse", metrics=["mae"]
)
model.fit(
    hvd.data.shard((x, y), batch_size=BATCH // hvd.size()),
    epochs=1,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
