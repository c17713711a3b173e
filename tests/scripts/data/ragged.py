"""Ragged batches: sentences of different length, as ragged tensors and padded batch by batch.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 16

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(9)
sentences = [random.integers(1, 30, size=n).tolist() for n in random.integers(2, 9, size=160)]
labels = np.array([float(max(words) > 25) for words in sentences], "float32")
ragged = tf.ragged.constant(sentences, dtype=tf.int32)

dataset = tf.data.Dataset.from_tensor_slices((ragged, labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())
dataset = dataset.map(lambda words, y: (words.to_tensor(), y))

model = keras.Sequential(
    [
        layers.Embedding(30, 8, mask_zero=True),
        layers.LSTM(8),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="binary_crossentropy"
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
