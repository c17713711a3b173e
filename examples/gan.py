"""Train a GAN: two networks, each with a distributed optimizer.

    hvdrun -np 2 examples/gan.py

It learns to draw points on a circle from noise.
"""

import hvd_keras as hvd
import keras
import numpy as np
import tensorflow as tf

NOISE = 8

hvd.init()
angles = np.random.default_rng(0).uniform(0, 2 * np.pi, size=4096)
circle = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")


def network(inputs, outputs):
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64, activation="relu")]
    return keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(outputs)])


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(NOISE, 2), network(2, 1)

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.critic_optimizer = critic_optimizer

    def call(self, noise):
        return self.critic(self.generator(noise))

    def train_step(self, real):
        # Other noise on each rank, as fit with the broadcast seeds keras.random.
        noise = keras.random.normal((tf.shape(real)[0], NOISE))
        with tf.GradientTape() as tape:
            false, true = self(noise, training=True), self.critic(real, training=True)
            critic_loss = tf.reduce_mean(tf.nn.softplus(false) + tf.nn.softplus(-true))
        self.apply(self.critic_optimizer, self.critic, tape, critic_loss)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(-self(noise, training=True)))
        self.apply(self.generator_optimizer, self.generator, tape, loss)
        return {"critic": critic_loss, "generator": loss}

    def apply(self, optimizer, model, tape, loss):
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def distance():
    """Return how far the generator's points are from the circle, on average."""
    noise = np.random.default_rng(1).normal(size=(512, NOISE)).astype("float32")
    return float(np.abs(np.linalg.norm(gan.generator(noise), axis=1) - 1).mean())


gan = GAN()
before = distance()
gan.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(5e-4, beta_1=0.5)),
    hvd.DistributedOptimizer(keras.optimizers.Adam(5e-4, beta_1=0.5)),
)
gan.fit(
    hvd.data.shard(circle, batch_size=64),
    epochs=40,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=2 if hvd.rank() == 0 else 0,
)
after = distance()
if hvd.rank() == 0:
    print(f"mean distance from the circle: {after:.2f}, before training {before:.2f}")
