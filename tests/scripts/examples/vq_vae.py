"""A VQ-VAE: a layer with a codebook of its own, add_loss, straight-through gradients.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 32


class VectorQuantizer(layers.Layer):
    def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.embedding_dim = embedding_dim
        self.num_embeddings = num_embeddings
        self.beta = beta
        self.embeddings = self.add_weight(
            shape=(embedding_dim, num_embeddings),
            initializer=keras.initializers.RandomUniform(),
            trainable=True,
            name="embeddings_vqvae",
        )

    def call(self, x):
        distances = (
            tf.reduce_sum(x**2, axis=1, keepdims=True)
            + tf.reduce_sum(self.embeddings**2, axis=0)
            - 2 * tf.matmul(x, self.embeddings)
        )
        codes = tf.one_hot(tf.argmin(distances, axis=1), self.num_embeddings)
        quantized = tf.matmul(codes, self.embeddings, transpose_b=True)
        commitment = tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        codebook = tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment + codebook)
        return x + tf.stop_gradient(quantized - x)


class VQVAETrainer(keras.Model):
    def __init__(self, train_variance, latent_dim=3, num_embeddings=8, **kwargs):
        super().__init__(**kwargs)
        self.train_variance = train_variance
        self.encoder = keras.Sequential([layers.Dense(12, "tanh"), layers.Dense(latent_dim)])
        self.quantizer = VectorQuantizer(num_embeddings, latent_dim, name="vector_quantizer")
        self.decoder = keras.Sequential([layers.Dense(12, "tanh"), layers.Dense(6)])
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    def call(self, x):
        return self.decoder(self.quantizer(self.encoder(x)))

    @property
    def metrics(self):
        return [self.total_loss_tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstructions = self(x)
            total_loss = tf.reduce_mean((x - reconstructions) ** 2) / self.train_variance
            total_loss += sum(self.losses)
        grads = tape.gradient(total_loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        self.total_loss_tracker.update_state(total_loss)
        return {"loss": self.total_loss_tracker.result()}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
x = np.random.default_rng(4).normal(size=(256, 6)).astype("float32")
trainer = VQVAETrainer(float(np.var(x)))
trainer.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.002)))
trainer.fit(
    x[hvd.rank() :: hvd.size()],
    epochs=3,
    batch_size=BATCH // hvd.size(),
    shuffle=False,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *trainer.get_weights())
