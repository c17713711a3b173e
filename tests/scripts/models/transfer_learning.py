"""A network of keras.applications, frozen below a new head, then opened with a small rate.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 8

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(5)
images = random.uniform(size=(16, 32, 32, 3)).astype("float32")
labels = (images[..., 0].mean(axis=(1, 2)) > 0.5).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())

base = keras.applications.MobileNet(
    input_shape=(32, 32, 3), alpha=0.25, include_top=False, weights=None
)
# In place of weights from a file: such that something comes through, at the first rank only.
if hvd.rank() == 0:
    base.set_weights([w * 3.5 if w.ndim == 4 else w for w in base.get_weights()])
base.trainable = False
inputs = keras.Input((32, 32, 3))
x = layers.Rescaling(2.0, offset=-1.0)(inputs)
x = base(x, training=False)
x = layers.GlobalAveragePooling2D()(x)
model = keras.Model(inputs, layers.Dense(1)(x))


def train(rate, epochs):
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(rate)),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    model.fit(
        images[mine],
        labels[mine],
        batch_size=BATCH // hvd.size(),
        epochs=epochs,
        shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        verbose=0,
    )


train(1e-2, epochs=1)
base.trainable = True
for layer in base.layers:
    if isinstance(layer, layers.BatchNormalization):
        layer.trainable = False  # it keeps its statistics
train(1e-3, epochs=1)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
