"""A subclassed model that takes nested dicts and gives a dict; nothing is built before fit.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvd_keras as hvd

BATCH = 32


class TwoTowers(keras.Model):
    def __init__(self):
        super().__init__()
        self.users = layers.Embedding(20, 8)
        self.items = layers.Embedding(40, 8)
        self.context = layers.Dense(8, activation="relu")
        self.rating = layers.Dense(1)

    def call(self, inputs, training=False):
        query = self.users(inputs["user"]["id"]) + self.context(inputs["user"]["context"])
        candidate = self.items(inputs["item"])
        score = ops.sum(query * candidate, axis=-1, keepdims=True)
        return {"score": score, "rating": self.rating(ops.concatenate([query, candidate], -1))}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(10)
user = {"id": random.integers(0, 20, 256), "context": random.normal(size=(256, 3))}
x = {"user": user, "item": random.integers(0, 40, 256)}
y = {"score": random.integers(0, 2, (256, 1)), "rating": random.normal(size=(256, 1))}
dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())

model = TwoTowers()
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss={"score": keras.losses.BinaryCrossentropy(from_logits=True), "rating": "mse"},
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
