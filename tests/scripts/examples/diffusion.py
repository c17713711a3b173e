"""A small diffusion model: normalised inputs, an averaged copy of the network, AdamW.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvd_keras as hvd

BATCH, EMA = 32, 0.9


def network():
    noisy, rate = keras.Input((6,)), keras.Input((1,))
    x = layers.Concatenate()([noisy, layers.Dense(4, activation="tanh")(rate)])
    x = layers.Dense(24, activation="swish")(x)
    return keras.Model([noisy, rate], layers.Dense(6, kernel_initializer="zeros")(x))


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = network()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def train_step(self, data):
        images, noises, times = data
        images = self.normalizer(images, training=True)
        angles = 0.3 + times * 1.2
        noisy = ops.cos(angles) * images + ops.sin(angles) * noises
        with tf.GradientTape() as tape:
            predicted = self.network([noisy, ops.sin(angles) ** 2], training=True)
            noise_loss = self.loss(noises, predicted)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(noise_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(EMA * ema_weight + (1 - EMA) * weight)
        return {m.name: m.result() for m in self.metrics}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(1)
images = random.normal(3.0, 2.0, size=(256, 6)).astype("float32")
noises = random.normal(size=(256, 6)).astype("float32")
times = random.uniform(size=(256, 1)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((images, noises, times))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())

model = DiffusionModel()
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3, weight_decay=1e-4)),
    loss=keras.losses.MeanAbsoluteError(),
)
model.normalizer.adapt(images)
model.fit(
    dataset, epochs=3, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
)
weights = [*model.network.get_weights(), *model.ema_network.get_weights()]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *weights)
