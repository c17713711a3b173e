"""A user's own Callback that looks into the model at each hook, and a LambdaCallback.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 32


class LossHistory(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.losses, self.predictions = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])

    def on_epoch_begin(self, epoch, logs=None):
        self.before = self.model.optimizer.iterations.numpy()

    def on_epoch_end(self, epoch, logs=None):
        self.predictions.append(self.model.predict(x[:4], verbose=0))
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.01
        if epoch == 2:
            self.model.stop_training = True


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(3)
x = random.normal(size=(256, 5)).astype("float32")
y = x[:, :1] - x[:, 1:2]
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
history, seen = LossHistory(), []
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=10,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        history,
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: seen.append(epoch),
            on_train_end=lambda logs: print("The end of training"),
        ),
    ],
    verbose=0,
)
assert seen == [0, 1, 2]
assert len(history.losses) == 3 * len(x) // BATCH
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), *history.predictions)
