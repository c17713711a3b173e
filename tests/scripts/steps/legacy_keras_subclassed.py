"""tf_keras: a subclassed model with a train_step, as written before Keras 3.

expect: equal
needs: tf_keras
env: TF_USE_LEGACY_KERAS=1
"""

import os

import numpy as np
import tensorflow as tf

import hvd_keras as hvd

BATCH = 32


class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(16, activation="relu")
        self.out = tf.keras.layers.Dense(1)

    def call(self, inputs, training=None):
        return self.out(self.hidden(inputs["features"]))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compiled_loss(y, y_pred, regularization_losses=self.losses)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.compiled_metrics.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(14)
x = random.normal(size=(256, 6)).astype("float32")
y = x[:, :1] * 2 - x[:, 1:2]
mine = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices(({"features": x[mine]}, y[mine]))

model = Net()
optimizer = tf.keras.optimizers.Adam(0.01)
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse", metrics=["mae"])
history = model.fit(
    dataset.batch(BATCH // hvd.size()),
    epochs=2,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
)
errors = history.history["mae"]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), errors)
