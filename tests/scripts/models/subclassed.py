"""A subclassed model with a block of layers, nothing built before fit.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32


class ResidualBlock(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.hidden = layers.Dense(units, activation="relu")
        self.norm = layers.LayerNormalization()

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="scale")
        self.out = layers.Dense(shape[-1])
        super().build(shape)

    def call(self, x):
        return self.norm(x + self.scale * self.out(self.hidden(x)))


class Classifier(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.blocks = [ResidualBlock(16) for _ in range(2)]
        self.head = layers.Dense(classes)

    def call(self, inputs):
        x = inputs
        for block in self.blocks:
            x = block(x)
        return self.head(x)


hvd.init()
keras.utils.set_random_seed(100 + hvd.rank())
random = np.random.default_rng(1)
x = random.normal(size=(320, 12)).astype("float32")
y = np.argmax(x[:, :4], axis=1)

model = Classifier(4)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
)
history = model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
)
results = [*model.get_weights(), np.array(history.history["loss"])]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *results)
