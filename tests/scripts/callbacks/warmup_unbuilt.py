"""Warm-up of the learning rate and averaged metrics around a model that its first batch builds.

expect: differ-ok
fast: yes
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(5)
x = random.normal(size=(256, 8)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
mine = slice(hvd.rank(), None, hvd.size())

rate = 0.05 * hvd.size()  # as the README says, so one process has another
model = keras.Sequential(
    [layers.Dense(16, activation="relu"), layers.Dropout(0.3), layers.Dense(3)]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
)
history = model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH,
    epochs=4,
    validation_data=(x[mine], y[mine]),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
        hvd.callbacks.ModelCheckpoint("model-{epoch}.keras"),
        hvd.callbacks.ProgressLogger(),
    ],
    verbose=0,
)
logs = [history.history[name][-1] for name in ("loss", "top2", "val_accuracy")]
assert logs[0] < history.history["loss"][0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), logs)
