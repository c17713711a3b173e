"""Contrastive pretraining with a projection head, then a linear probe on the frozen encoder.

expect: differ-ok
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvd_keras as hvd

BATCH, TEMPERATURE = 32, 0.1


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.augmenter = keras.Sequential([layers.GaussianNoise(0.2), layers.Dropout(0.1)])
        self.encoder = keras.Sequential([layers.Dense(16, activation="relu")])
        self.projection_head = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(8)])
        self.probe = keras.Sequential([layers.Dense(3)])
        self.loss_tracker = keras.metrics.Mean(name="c_loss")

    def compile(self, contrastive_optimizer, probe_optimizer):
        super().compile()
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.loss_tracker]

    def contrastive_loss(self, one, two):
        one, two = ops.normalize(one, axis=1), ops.normalize(two, axis=1)
        similarities = ops.matmul(one, ops.transpose(two)) / TEMPERATURE
        labels = ops.arange(ops.shape(one)[0])
        there = keras.losses.sparse_categorical_crossentropy(labels, similarities, True)
        back = ops.transpose(similarities)
        back = keras.losses.sparse_categorical_crossentropy(labels, back, True)
        return ops.mean(there + back) / 2

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            views = [self.augmenter(x, training=True) for _ in range(2)]
            loss = self.contrastive_loss(*(self.projection_head(self.encoder(v)) for v in views))
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        with tf.GradientTape() as tape:
            probe_loss = self.probe_loss(y, self.probe(tf.stop_gradient(self.encoder(x))))
        weights = self.probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, weights), weights))
        self.loss_tracker.update_state(loss)
        return {"c_loss": self.loss_tracker.result(), "p_loss": probe_loss}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(3)
x = random.normal(size=(256, 10)).astype("float32")
y = np.argmax(x[:, :3], axis=1)

model = ContrastiveModel()
model.compile(
    contrastive_optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.005)),
    probe_optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.005)),
)
model.fit(
    hvd.data.shard((x, y), batch_size=BATCH // hvd.size()),
    epochs=3,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
