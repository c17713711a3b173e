"""A variational autoencoder: a sampling layer with a seed generator, losses of a train_step.

expect: differ-ok
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvd_keras as hvd

BATCH = 32


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            error = ops.mean(ops.sum(ops.square(data - reconstruction), axis=1))
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            loss = error + ops.mean(ops.sum(kl, axis=1))
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(1)
x = (random.normal(size=(320, 2)) @ random.normal(size=(2, 12))).astype("float32")
x = x[hvd.rank() :: hvd.size()]

inputs = keras.Input((12,))
hidden = layers.Dense(16, activation="relu")(inputs)
mean, log_var = layers.Dense(2, name="mean")(hidden), layers.Dense(2, name="log_var")(hidden)
encoder = keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])], name="encoder")
decoder = keras.Sequential([keras.Input((2,)), layers.Dense(16, "relu"), layers.Dense(12)])

vae = VAE(encoder, decoder)
vae.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
history = vae.fit(x, epochs=5, batch_size=BATCH // hvd.size(), callbacks=callbacks, verbose=0)
assert history.history["loss"][-1] < history.history["loss"][0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *vae.get_weights())
