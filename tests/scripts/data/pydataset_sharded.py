"""A PyDataset through hvd.data.shard, whose batches its worker threads load.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 16


class Images(keras.utils.PyDataset):
    """As if each image were read from a file of its own."""

    def __init__(self, count, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.count, self.batch_size = count, batch_size

    def __len__(self):
        return self.count // self.batch_size

    def __getitem__(self, idx):
        numbers = range(idx * self.batch_size, (idx + 1) * self.batch_size)
        images = [np.random.default_rng(n).uniform(size=(8, 8, 3)) for n in numbers]
        images = np.array(images, "float32")
        return images, (images.mean(axis=(1, 2, 3)) > 0.5).astype("float32")


hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential(
    [layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(1, "sigmoid")]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="binary_crossentropy"
)
model.fit(
    hvd.data.shard(Images(256, BATCH // hvd.size(), workers=2), shuffle=False),
    epochs=2,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    shuffle=False,
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
