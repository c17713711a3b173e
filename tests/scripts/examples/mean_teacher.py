"""A teacher's weights follow the student's in train_step; test_step and predict_step use it.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvd_keras as hvd

BATCH = 32


class MeanTeacher(keras.Model):
    def __init__(self, student, teacher, decay=0.9):
        super().__init__()
        self.student, self.teacher, self.decay = student, teacher, decay
        self.teacher.trainable = False
        self.ramp = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def call(self, x):
        return self.teacher(x)

    def train_step(self, data):
        x, y = data
        target = ops.softmax(self.teacher(x, training=False))
        self.ramp.assign_add(1.0)
        with tf.GradientTape() as tape:
            logits = self.student(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            apart = ops.mean(ops.square(ops.softmax(logits) - target))
            loss = ops.mean(losses) + ops.minimum(self.ramp / 10.0, 1.0) * apart
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for mine, other in zip(self.teacher.weights, self.student.weights, strict=True):
            mine.assign(self.decay * mine + (1 - self.decay) * other)
        self.loss_tracker.update_state(loss)
        self.accuracy.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        self.accuracy.update_state(y, self.teacher(x))
        return {"accuracy": self.accuracy.result()}

    def predict_step(self, x):
        return ops.softmax(self.teacher(x))


hvd.init()
keras.utils.set_random_seed(3)
random = np.random.default_rng(2)
x = random.normal(size=(200, 6)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
mine = slice(hvd.rank(), None, hvd.size())


def network():
    return keras.Sequential([keras.Input((6,)), layers.Dense(16, "relu"), layers.Dense(3)])


model = MeanTeacher(network(), network())
model.teacher.set_weights(model.student.get_weights())
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
fit = {"batch_size": BATCH // hvd.size(), "epochs": 2, "shuffle": False, "verbose": 0}
model.fit(x[mine], y[mine], **fit)
found = model.predict(x, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), found)
