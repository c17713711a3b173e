"""The classic GAN of Keras 2: a combined model with a frozen discriminator, train_on_batch in turn.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, LATENT = 32, 4

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(0)
real = random.normal(2.0, 0.5, size=(128, 2)).astype("float32")
noise = random.normal(size=(128, LATENT)).astype("float32")

discriminator = keras.Sequential(
    [keras.Input((2,)), layers.Dense(16, activation="tanh"), layers.Dense(1, activation="sigmoid")]
)
discriminator.compile(
    loss="binary_crossentropy",
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)),
    metrics=["accuracy"],
)
generator = keras.Sequential([keras.Input((LATENT,)), layers.Dense(16, "tanh"), layers.Dense(2)])
z = keras.Input((LATENT,))
discriminator.trainable = False
combined = keras.Model(z, discriminator(generator(z)))
combined.compile(
    loss="binary_crossentropy", optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
)
hvd.broadcast_variables(discriminator.variables, root_rank=0)
hvd.broadcast_variables(generator.variables, root_rank=0)

share = BATCH // hvd.size()
for _ in range(2):
    for first in range(0, len(real), BATCH):
        mine = slice(first + hvd.rank() * share, first + (hvd.rank() + 1) * share)
        fake = generator.predict_on_batch(noise[mine])
        discriminator.train_on_batch(real[mine], np.ones((share, 1)))
        discriminator.train_on_batch(fake, np.zeros((share, 1)))
        combined.train_on_batch(noise[mine], np.ones((share, 1)))
weights = [*discriminator.get_weights(), *generator.get_weights()]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *weights)
