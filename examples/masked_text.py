"""Tag the words of sentences of different lengths, padded and masked.

    hvdrun -np 2 examples/masked_text.py

Padding must not count: in the layers (mask_zero), the loss and the metrics.
"""

import hvd_keras as hvd
import keras
import numpy as np

WORDS, LONGEST = 200, 24

hvd.init()
random = np.random.default_rng(0)
lengths = random.integers(4, LONGEST + 1, size=2048)
words = random.integers(1, WORDS, size=(2048, LONGEST))
words[np.arange(LONGEST) >= lengths[:, None]] = 0  # padding
before = np.pad(words, ((0, 0), (1, 0)))[:, :-1]
tags = (words > before).astype("int32")  # needs the word before, so an LSTM

model = keras.Sequential(
    [
        keras.layers.Embedding(WORDS, 32, mask_zero=True),
        keras.layers.LSTM(32, return_sequences=True),
        keras.layers.Dense(2),
    ]
)
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(0.005 * hvd.size())),
    # Keras passes the mask on: padded words have no loss and do not count in the metric.
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
)
history = model.fit(
    hvd.data.shard((words, tags), batch_size=32),
    epochs=4,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=2 if hvd.rank() == 0 else 0,
)
losses = history.history["loss"]
