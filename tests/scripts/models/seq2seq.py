"""An encoder and a decoder with attention that learn to reverse sequences; padding is masked.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, LENGTH, SYMBOLS, START = 32, 6, 10, 10

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(3)
source = random.integers(1, SYMBOLS, size=(256, LENGTH))
for row, keep in zip(source, random.integers(3, LENGTH + 1, size=256), strict=True):
    row[keep:] = 0
target = source[:, ::-1].copy()
decoder_in = np.concatenate([np.full((256, 1), START), target[:, :-1]], axis=1)

encoder_inputs = keras.Input((None,), dtype="int32")
embedded = layers.Embedding(SYMBOLS, 16, mask_zero=True)(encoder_inputs)
encoded, state = layers.GRU(16, return_sequences=True, return_state=True)(embedded)
decoder_inputs = keras.Input((None,), dtype="int32")
decoded = layers.Embedding(SYMBOLS + 1, 16)(decoder_inputs)
decoded = layers.GRU(16, return_sequences=True)(decoded, initial_state=state)
attended = layers.MultiHeadAttention(2, 8)(decoded, encoded)
outputs = layers.Dense(SYMBOLS)(layers.concatenate([decoded, attended]))
model = keras.Model([encoder_inputs, decoder_inputs], outputs)

model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
mine = slice(hvd.rank(), None, hvd.size())
model.fit(
    [source[mine], decoder_in[mine]],
    target[mine],
    batch_size=BATCH // hvd.size(),
    epochs=1,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
