"""A GAN in its own train_step, with an optimizer for each of its two networks.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH, LATENT = 32, 4


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def train_step(self, data):
        real, noise = data
        ones, zeros = tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(tf.concat([real, self.generator(noise)], axis=0))
            d_loss = self.loss_fn(tf.concat([ones, zeros], axis=0), predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ones, self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(0)
real = random.normal(2.0, 0.5, size=(256, 2)).astype("float32")
noise = random.normal(size=(256, LATENT)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((real, noise))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())

discriminator = keras.Sequential([layers.Dense(16), layers.LeakyReLU(), layers.Dense(1)])
generator = keras.Sequential([layers.Dense(16), layers.LeakyReLU(), layers.Dense(2)])
gan = GAN(discriminator, generator)
gan.compile(
    d_optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.003)),
    g_optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.003)),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
gan.fit(dataset, epochs=3, callbacks=callbacks, verbose=0)
weights = [*discriminator.get_weights(), *generator.get_weights()]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *weights)
