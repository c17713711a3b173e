"""Collaborative filtering in the manner of MovieLens: embeddings, dot products, a split by hand.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers, ops

import hvd_keras as hvd

USERS, MOVIES, EMBEDDING, BATCH = 30, 20, 8, 64


class RecommenderNet(keras.Model):
    def __init__(self, users, movies, size):
        super().__init__()
        regularizer = keras.regularizers.l2(1e-3)
        initializer = "he_normal"
        self.users = layers.Embedding(users, size, initializer, regularizer)
        self.user_bias = layers.Embedding(users, 1)
        self.movies = layers.Embedding(movies, size, initializer, regularizer)
        self.movie_bias = layers.Embedding(movies, 1)

    def call(self, inputs):
        user, movie = inputs[:, 0], inputs[:, 1]
        dot = ops.sum(self.users(user) * self.movies(movie), axis=1, keepdims=True)
        return ops.sigmoid(dot + self.user_bias(user) + self.movie_bias(movie))


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(4)
pairs = np.stack([random.integers(0, USERS, 704), random.integers(0, MOVIES, 704)], axis=1)
ratings = ((pairs[:, 0] * pairs[:, 1]) % 5 + 1).astype("float32")
ratings = (ratings - ratings.min()) / (ratings.max() - ratings.min())
split = 640
train = slice(hvd.rank(), split, hvd.size())

model = RecommenderNet(USERS, MOVIES, EMBEDDING)
model.compile(
    loss="binary_crossentropy",
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate=0.01)),
)
model.fit(
    x=pairs[train],
    y=ratings[train],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    validation_data=(pairs[split:], ratings[split:]),
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
