"""StringLookup adapted to each rank's share of the data: the ranks number the words differently.

expect: error "string_lookup"
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(3)
cities = np.sort(random.choice(["Bonn", "Oslo", "Rome", "Riga", "Bern", "Kyiv"], size=256))
prices = np.array([len(set(city)) for city in cities], "float32")
share = len(cities) // hvd.size()
cities = cities[hvd.rank() * share : (hvd.rank() + 1) * share]
prices = prices[hvd.rank() * share : (hvd.rank() + 1) * share]

lookup = layers.StringLookup(output_mode="int", num_oov_indices=1)
lookup.adapt(cities)
inputs = keras.Input((1,), dtype="string")
embedded = layers.Flatten()(layers.Embedding(10, 4)(lookup(inputs)))
model = keras.Model(inputs, layers.Dense(1)(embedded))
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
dataset = tf.data.Dataset.from_tensor_slices((cities[:, None], prices))
dataset = dataset.batch(BATCH // hvd.size())
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
