"""A PyDataset with workers, which knows its rank's share; a Dense model that is not built.

expect: equal
"""

import math
import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32


class Table(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, idx):
        rows = slice(idx * self.batch_size, (idx + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(11)
x = random.normal(size=(192, 5)).astype("float32")
y = np.abs(x).sum(axis=1, keepdims=True)
mine = slice(hvd.rank(), None, hvd.size())
share = Table(x[mine], y[mine], BATCH // hvd.size(), workers=2, max_queue_size=4)

model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.005)), loss="mae")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(share, epochs=2, shuffle=False, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
