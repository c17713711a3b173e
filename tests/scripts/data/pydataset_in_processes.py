"""A PyDataset whose batches are made in worker processes, which fork from a rank.

expect: equal
"""

import os

import keras
import numpy as np

import hvd_keras as hvd

BATCH = 32


class Rows(keras.utils.PyDataset):
    def __init__(self, x, y, batch, **arguments):
        super().__init__(**arguments)
        self.x, self.y, self.batch = x, y, batch

    def __len__(self):
        return len(self.x) // self.batch

    def __getitem__(self, i):
        rows = slice(i * self.batch, (i + 1) * self.batch)
        return self.x[rows], self.y[rows]


hvd.init()
keras.utils.set_random_seed(hvd.rank())
x = np.random.default_rng(6).normal(size=(320, 8)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
share = slice(hvd.rank(), None, hvd.size())
data = Rows(x[share], y[share], BATCH // hvd.size(), workers=2, use_multiprocessing=True)

model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(data, epochs=2, shuffle=False, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
