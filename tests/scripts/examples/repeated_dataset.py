"""A dataset without an end, steps_per_epoch, and rank 0 alone evaluates, logs and saves.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(12)
x = random.normal(size=(256, 6)).astype("float32")
y = x[:, :1] - x[:, 1:2]
train = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
train = train.repeat().batch(BATCH // hvd.size()).prefetch(tf.data.AUTOTUNE)
val = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)

model = tf.keras.Sequential(
    [tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(1)]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.Nadam(0.01)), loss="mse", metrics=["mae"]
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    tf.keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True))
    callbacks.append(tf.keras.callbacks.CSVLogger("log.csv"))
model.fit(
    train,
    epochs=4,
    steps_per_epoch=8,
    validation_data=val,
    validation_steps=2,
    verbose=0,
    callbacks=callbacks,
)
if hvd.rank() == 0:
    loss, _ = model.evaluate(x, y, verbose=0)
    model.save("last.keras")
    again = tf.keras.models.load_model("last.keras")
    assert np.isclose(again.evaluate(x, y, verbose=0)[0], loss)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
