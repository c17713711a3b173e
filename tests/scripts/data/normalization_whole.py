"""Normalization and Discretization adapted to all of the data, on every rank.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(1)
ages = random.integers(18, 80, size=(256, 1)).astype("float32")
incomes = random.lognormal(10, 0.5, size=(256, 1)).astype("float32")
labels = ((ages > 40) & (incomes > 20000)).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())

normalize = layers.Normalization()
normalize.adapt(incomes)
bins = layers.Discretization(num_bins=6, output_mode="one_hot")
bins.adapt(ages)
age, income = keras.Input((1,), name="age"), keras.Input((1,), name="income")
features = layers.concatenate([bins(age), normalize(income)])
outputs = layers.Dense(1, activation="sigmoid")(layers.Dense(8, activation="relu")(features))
model = keras.Model([age, income], outputs)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="binary_crossentropy"
)
model.fit(
    {"age": ages[mine], "income": incomes[mine]},
    labels[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
