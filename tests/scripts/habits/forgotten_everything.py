"""A script that was started with hvdrun before more than hvd.init() was added to it.

expect: warn "hvd.DistributedOptimizer"
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

hvd.init()
random = np.random.default_rng(0)
x = random.normal(size=(256, 6)).astype("float32")
y = x.sum(axis=1)

inputs = keras.Input((6,))
model = keras.Model(inputs, layers.Dense(1)(layers.Dense(8, activation="relu")(inputs)))
model.compile(optimizer="adam", loss="mse")
model.fit(x, y, epochs=2, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
