"""A teacher trains, then a student learns from it in compute_loss; one callback instance for both.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers, ops

import hvd_keras as hvd

BATCH = 32


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(self, distillation_loss_fn, alpha=0.1, temperature=3, **kwargs):
        super().compile(**kwargs)
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher = self.teacher(x, training=False)
        hard = super().compute_loss(x, y, y_pred, sample_weight)
        soft = self.distillation_loss_fn(
            ops.softmax(teacher / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        )
        return self.alpha * hard + (1 - self.alpha) * soft * self.temperature**2

    def call(self, x):
        return self.student(x)


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(2)
x = random.normal(size=(256, 8)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
mine = slice(hvd.rank(), None, hvd.size())
fit = {"batch_size": BATCH // hvd.size(), "epochs": 2, "shuffle": False, "verbose": 0}
fit["callbacks"] = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

teacher = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(3)])
teacher.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss=cross_entropy)
teacher.fit(x[mine], y[mine], **fit)

student = keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(3)])
distiller = Distiller(student, teacher)
teacher.trainable = False
distiller.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    metrics=["accuracy"],
    loss=cross_entropy,
    distillation_loss_fn=keras.losses.KLDivergence(),
)
distiller.fit(x[mine], y[mine], **fit)
weights = [*teacher.get_weights(), *student.get_weights()]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *weights)
