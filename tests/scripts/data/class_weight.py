"""class_weight for rare classes, and validation_split of each rank's share.

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
random = np.random.default_rng(15)
x = random.normal(size=(320, 6)).astype("float32")
y = (x[:, 0] + x[:, 1] > 1.5).astype("int32")
mine = slice(hvd.rank(), None, hvd.size())
counts = np.bincount(y)
class_weight = {i: len(y) / (2 * count) for i, count in enumerate(counts)}

model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(1, "sigmoid")])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss="binary_crossentropy",
    metrics=[keras.metrics.Precision(), keras.metrics.Recall(), keras.metrics.AUC(name="auc")],
)
history = model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    validation_split=0.2,
    class_weight=class_weight,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
)
auc = history.history["val_auc"]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), auc)
