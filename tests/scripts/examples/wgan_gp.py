"""A WGAN with gradient penalty: a tape within a tape, three critic steps for each generator step.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH, LATENT, CRITIC_STEPS = 32, 4, 3


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, gp_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer

    def gradient_penalty(self, real, fake):
        middle = 0.5 * (real + fake)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(middle)
            prediction = self.discriminator(middle, training=True)
        slopes = gp_tape.gradient(prediction, middle)
        norm = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1) + 1e-9)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, data):
        real, noise = data
        for _ in range(CRITIC_STEPS):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = tf.reduce_mean(self.discriminator(fake, training=True))
                cost -= tf.reduce_mean(self.discriminator(real, training=True))
                d_loss = cost + self.gp_weight * self.gradient_penalty(real, fake)
            gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradient, self.discriminator.trainable_variables))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.generator(noise, training=True)))
        gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradient, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(0)
real = random.normal(1.0, 0.5, size=(192, 3)).astype("float32")
noise = random.normal(size=(192, LATENT)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((real, noise)).shard(hvd.size(), hvd.rank())
dataset = dataset.batch(BATCH // hvd.size())

critic = keras.Sequential([keras.Input((3,)), layers.Dense(16, activation="tanh"), layers.Dense(1)])
generator = keras.Sequential(
    [keras.Input((LATENT,)), layers.Dense(16, activation="tanh"), layers.Dense(3)]
)
wgan = WGAN(critic, generator)
wgan.compile(
    d_optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
    g_optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
)
wgan.fit(
    dataset,
    epochs=2,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
weights = [*critic.get_weights(), *generator.get_weights()]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *weights)
