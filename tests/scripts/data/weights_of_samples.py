"""sample_weight as an argument of fit, with weighted metrics, to a model that is not built.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(14)
x = random.normal(size=(256, 6)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
weight = np.where(y == 2, 3.0, 0.5).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([layers.Dense(16, activation="elu"), layers.Dense(3)])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
)
history = model.fit(
    x[mine],
    y[mine],
    sample_weight=weight[mine],
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
)
accuracy = history.history["accuracy"]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), accuracy)
