"""StringLookup, IntegerLookup and CategoryEncoding in the input pipeline, before the model.

expect: equal
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
random = np.random.default_rng(4)
colors = random.choice(["red", "green", "blue"], size=(256, 1))
floors = random.choice([1, 2, 5, 9], size=(256, 1))
y = (colors == "red") * 1.0 + floors / 10

color_index = layers.StringLookup(num_oov_indices=0)
color_index.adapt(colors)
floor_index = layers.IntegerLookup(output_mode="one_hot")
floor_index.adapt(floors)
encode = layers.CategoryEncoding(num_tokens=3, output_mode="one_hot")


def preprocess(color, floor, label):
    floor = tf.cast(floor_index(floor), tf.float32)
    return tf.concat([encode(color_index(color)), floor], axis=1), label


dataset = tf.data.Dataset.from_tensor_slices((colors, floors, y.astype("float32")))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())
dataset = dataset.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE).cache().prefetch(2)

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss="mae")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(dataset, epochs=3, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
