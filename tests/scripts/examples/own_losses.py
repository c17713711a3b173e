"""compute_loss of one's own, an activity regularizer, a metric class and a Lambda layer.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers, ops

import hvd_keras as hvd

BATCH = 32


class Within(keras.metrics.Metric):
    def __init__(self, name="within", **kwargs):
        super().__init__(name=name, **kwargs)
        self.hits = self.add_variable(shape=(), initializer="zeros", name="hits")
        self.rows = self.add_variable(shape=(), initializer="zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        near = ops.cast(ops.abs(y_true - y_pred) < 0.5, "float32")
        self.hits.assign_add(ops.sum(near))
        self.rows.assign_add(ops.cast(ops.size(near), "float32"))

    def result(self):
        return self.hits / self.rows


class Model(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="own_loss")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean(ops.log(ops.cosh(y_pred - y)))
        loss += ops.sum(self.losses)
        self.loss_tracker.update_state(loss)
        return loss

    @property
    def metrics(self):
        return [self.loss_tracker, *super().metrics]


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(8)
x = random.normal(size=(256, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
mine = slice(hvd.rank(), None, hvd.size())

inputs = keras.Input((6,))
h = layers.Lambda(lambda t: ops.clip(t, -2, 2))(inputs)
h = layers.Dense(16, activation="relu", activity_regularizer=keras.regularizers.L2(1e-3))(h)
model = Model(inputs, layers.Dense(1, kernel_regularizer="l2")(h))
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.01)), metrics=[Within()]
)
history = model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=3,
    shuffle=False,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
).history
values = [np.array(history[name]) for name in ("own_loss", "within")]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), *values)
