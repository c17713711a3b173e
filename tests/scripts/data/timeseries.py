"""Forecasting with timeseries_dataset_from_array, its batches shared out by hand.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

PAST, BATCH = 12, 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(13)
hours = np.arange(400)
weather = np.stack([np.sin(hours / 12), np.cos(hours / 30), random.normal(0, 0.1, 400)], 1)
mean, std = weather[:300].mean(axis=0), weather[:300].std(axis=0)
weather = ((weather - mean) / std).astype("float32")


def windows(part):
    return keras.utils.timeseries_dataset_from_array(
        part[:-1], part[PAST:, :1], sequence_length=PAST, batch_size=BATCH
    )


train = windows(weather[:300]).unbatch().take(256)
train = train.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())
test = windows(weather[300:])

inputs = keras.Input((PAST, 3))
model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(8)(inputs)))
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5),
]
model.fit(train, epochs=3, validation_data=test, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
