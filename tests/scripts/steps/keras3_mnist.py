"""The same listing with Keras 3, which knows no experimental_run_tf_function.

expect: differ-ok
needs: sklearn
"""

import os

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvd_keras as hvd

BATCH = 64

hvd.init()
digits = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    (
        tf.cast(digits.images[..., tf.newaxis] / 16.0, tf.float32),
        tf.cast(digits.target, tf.int64),
    )
)
dataset = dataset.repeat().shuffle(1000).batch(BATCH // hvd.size())

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dropout(0.5),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.001 * hvd.size()
opt = hvd.DistributedOptimizer(
    tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
verbose = 1 if hvd.rank() == 0 else 0
steps = 40 // hvd.size()
history = model.fit(dataset, steps_per_epoch=steps, callbacks=callbacks, epochs=3, verbose=verbose)
assert history.history["loss"][-1] < history.history["loss"][0]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
