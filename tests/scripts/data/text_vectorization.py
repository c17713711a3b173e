"""TextVectorization with a vocabulary of the whole text, inside the model; strings as input.

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
random = np.random.default_rng(2)
good, bad = ["fine", "great", "lovely", "nice"], ["poor", "awful", "dull", "sad"]
other = ["the", "film", "actors", "story", "was", "were"]
labels = random.integers(0, 2, size=192)
texts = [" ".join([*random.choice(other, 4), random.choice(good if y else bad)]) for y in labels]

vectorize = layers.TextVectorization(max_tokens=40, output_sequence_length=6)
vectorize.adapt(texts)
model = keras.Sequential(
    [
        keras.Input((1,), dtype="string"),
        vectorize,
        layers.Embedding(40, 8),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss="binary_crossentropy"
)
dataset = tf.data.Dataset.from_tensor_slices((np.array(texts)[:, None], labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
