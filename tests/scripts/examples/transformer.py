"""Text classification with a transformer block and embeddings of tokens and positions.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers, ops

import hvd_keras as hvd

BATCH, WORDS, LENGTH, DIM = 16, 50, 12, 8


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, "relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        out = self.layernorm1(inputs + self.att(inputs, inputs))
        return self.layernorm2(out + self.ffn(out))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(vocab_size, embed_dim, mask_zero=True)
        self.pos_emb = layers.Embedding(maxlen, embed_dim)

    def call(self, x):
        return self.token_emb(x) + self.pos_emb(ops.arange(0, ops.shape(x)[-1]))


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(5)
x = random.integers(1, WORDS, size=(160, LENGTH))
x[:, -3:] *= random.integers(0, 2, size=(160, 3))
y = (x[:, 0] > WORDS // 2).astype(int)
mine = slice(hvd.rank(), None, hvd.size())

inputs = keras.Input((LENGTH,), dtype="int32")
h = TokenAndPositionEmbedding(LENGTH, WORDS, DIM)(inputs)
h = TransformerBlock(DIM, 2, 16)(h)
h = layers.GlobalAveragePooling1D()(h)
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(h))
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3, global_clipnorm=1.0)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    steps_per_execution=4,
)
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    validation_data=(x[:40], y[:40]),
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
