"""Learning-rate schedules in the optimizer, chained as in articles on warm-up, weights averaged.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, EPOCHS, ROWS = 32, 3, 256


class WarmUpCosine(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, base, total, warmup):
        self.base, self.total, self.warmup = base, total, warmup

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        cosine = 0.5 * self.base * (1 + keras.ops.cos(np.pi * step / self.total))
        return keras.ops.where(step < self.warmup, self.base * step / self.warmup, cosine)

    def get_config(self):
        return {"base": self.base, "total": self.total, "warmup": self.warmup}


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(11)
x = random.normal(size=(ROWS, 6)).astype("float32")
y = np.sin(x[:, :1] + x[:, 1:2])
mine = slice(hvd.rank(), None, hvd.size())

schedule = WarmUpCosine(0.05, total=EPOCHS * ROWS // BATCH, warmup=5)
optimizer = keras.optimizers.Nadam(schedule, use_ema=True, ema_momentum=0.9, weight_decay=1e-3)
model = keras.Sequential([layers.Dense(16, activation="gelu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
model.fit(
    x[mine],
    y[mine],
    batch_size=BATCH // hvd.size(),
    epochs=EPOCHS,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
assert int(model.optimizer.iterations) == EPOCHS * ROWS // BATCH
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
