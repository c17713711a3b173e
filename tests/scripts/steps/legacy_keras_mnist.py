"""The literature's listing for handwritten digits, with the tf.keras of TensorFlow before 2.16.

expect: differ-ok
needs: tf_keras sklearn
env: TF_USE_LEGACY_KERAS=1
"""

import os

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvd_keras as hvd

BATCH = 64

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
digits = load_digits()
images = (digits.images[:512, ..., None] / 16).astype("float32")[hvd.rank() :: hvd.size()]
labels = digits.target[:512][hvd.rank() :: hvd.size()]
dataset = tf.data.Dataset.from_tensor_slices((images, tf.cast(labels, tf.int64)))
dataset = dataset.repeat().batch(BATCH // hvd.size())

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=hvd.DistributedOptimizer(tf.optimizers.Adam(0.002)),
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.002, warmup_epochs=1, verbose=0),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
verbose = 2 if hvd.rank() == 0 else 0
model.fit(dataset, steps_per_epoch=8, callbacks=callbacks, epochs=2, verbose=verbose)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
