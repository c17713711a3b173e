"""A Siamese network with triplet loss: a model around a model, train_step and test_step of its own.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvd_keras as hvd

BATCH = 16


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        near = ops.sum(ops.square(anchor - positive), -1)
        return near, ops.sum(ops.square(anchor - negative), -1)


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.siamese_network.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self._compute_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        near, far = self.siamese_network(data)
        return ops.mean(ops.maximum(near - far + self.margin, 0.0))

    @property
    def metrics(self):
        return [self.loss_tracker]


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(2)
anchor, positive, negative = random.normal(size=(3, 160, 5)).astype("float32")
dataset = tf.data.Dataset.zip(
    tuple(tf.data.Dataset.from_tensor_slices(part) for part in (anchor, positive, negative))
)
train = dataset.take(128).shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size()).prefetch(8)
val = dataset.skip(128).batch(BATCH)

embedding = keras.Sequential(
    [keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(4, use_bias=False)]
)
inputs = [keras.Input((5,), name=name) for name in ("anchor", "positive", "negative")]
distances = DistanceLayer()(*(embedding(part) for part in inputs))
model = SiameseModel(keras.Model(inputs=inputs, outputs=distances))
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), weighted_metrics=[])
model.fit(
    train,
    epochs=2,
    validation_data=val,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
if hvd.rank() == 0:
    assert np.isfinite(model.evaluate(val, verbose=0))
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *embedding.get_weights())
