"""Keras's layers, losses and metrics in fit: as on one process, or with a word."""

import contextlib
import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import settings
from hvd_keras.training import step_trials
from tests.harness import training
from tests.parallel.layers import cases, compare

KINDS = ["layers", "losses", "metrics"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_is_known(kind: str) -> None:
    assert cases.unknown(kind) == set(), "add them to cases.py, and run make layers"


@pytest.mark.parametrize(
    ("of", "text", "expected"),
    [
        ("vector", "Softmax(axis=0)", "told"),
        ("vector", "UnitNormalization(axis=-2)", "told"),
        ("vector", "Lambda(lambda x: x - keras.ops.mean(x, 0))", "told"),
        ("vector", "Dense(3, activation=lambda x: keras.ops.softmax(x, 0))", "told"),
        ("vector", "Lambda(lambda x: x * 2)", "="),
        ("vector", "ActivityRegularization(0.01, 0.01)", "="),
        ("masked", "LSTM(3)", "="),
        ("sequence", "Softmax(axis=-2)", "="),
        ("vector", "Dropout(0.5)", "random"),
    ],
)
def test_some_layers(of: str, text: str, expected: str) -> None:
    assert compare.outcome("layers", of, text, "") == expected


def test_some_metrics() -> None:
    assert compare.outcome("metrics", "classes", "CosineSimilarity(axis=0)", "") == "told"
    assert compare.outcome("metrics", "classes", "CosineSimilarity()", "") == "="


class OverRows(keras.Model):
    """Mixes rows between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x) - keras.ops.mean(self.dense(x), 0)


class OverFirstRow(OverRows):
    """Its first half of a batch is computed from that half alone."""

    def call(self, x):
        return self.dense(x) - self.dense(x)[:1]


class OverAllRows(OverRows):
    def call(self, x):
        return self.dense(x) - hvd.allreduce(keras.ops.mean(self.dense(x), 0))


class OverRowsInLoss(OverRows):
    """Each row is compared with all others, as in contrastive learning."""

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, *_, **__):
        return -keras.ops.mean(
            keras.ops.diagonal(keras.ops.log_softmax(y @ keras.ops.transpose(y_pred)))
        )


class ByRowsInLoss(OverRowsInLoss):
    def compute_loss(self, x, y, y_pred, *more, **others):
        return super(OverRows, self).compute_loss(x, y, y_pred) + keras.ops.mean(y_pred**2)


class OverRowsInTarget(OverRowsInLoss):
    """As in clustering."""

    def compute_loss(self, x, y, y_pred, *_, **__):
        target = keras.ops.stop_gradient(y - keras.ops.mean(y_pred, 0))
        return keras.losses.MeanSquaredError()(target, y_pred)


class OverRowsInAddedLoss(OverRowsInLoss):
    """As experts' loads are balanced."""

    compute_loss = keras.Model.compute_loss

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.mean(self.dense(x), 0) ** 2))
        return self.dense(x)


class OverRowsInStep(OverRowsInLoss):
    """With random numbers for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = keras.layers.Dropout(0.5), keras.layers.BatchNormalization()
        self.steps = self.add_weight(initializer="zeros", trainable=False)

    def total(self, x, y):
        return super().compute_loss(
            x, y, self(self.drop(self.norm(x, training=True), training=True))
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.total(*data)
        self.steps.assign_add(1)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class ByRowsInStep(OverRowsInStep):
    def total(self, x, y):
        drawn = keras.random.normal(keras.ops.shape(y), seed=self.drop.seed_generator)
        y_pred = self(self.drop(self.norm(x, training=True), training=True))
        return keras.ops.mean((y + drawn - y_pred) ** 2) + keras.ops.sum(self.dense.kernel**2)


class ByRowsInTarget(OverRowsInStep):
    """As in distillation; the teacher normalizes."""

    def total(self, x, y):
        teacher = keras.ops.stop_gradient(self(self.norm(x, training=True)))
        classes = keras.losses.KLDivergence()(
            keras.ops.softmax(teacher), keras.ops.softmax(self(x))
        )
        return keras.losses.MeanSquaredError()(teacher + y, self(x)) + classes


class SumInStep(OverRowsInStep):
    def total(self, x, y):
        return keras.ops.sum((y - self(x)) ** 2)


class OverKnownInStep(OverRowsInStep):
    """Some labels are unknown."""

    unknown = -100.0

    def total(self, x, y):
        known = keras.ops.cast(y != self.unknown, "float32")
        return keras.ops.sum(known * (y - self(x)) ** 2) / (keras.ops.sum(known) + 1.0e-6)


class OverNonzeroInStep(OverKnownInStep):
    unknown = 0.0


class OverLargeInStep(OverKnownInStep):
    def total(self, x, y):
        large = keras.ops.cast(y > 10, "float32")
        return keras.ops.sum(large * self(x) ** 2) / (keras.ops.sum(large) + 1.0e-6)


class OverRowsInItsStep(OverRowsInStep):
    """The model has a step, not its class."""

    compute_loss, train_step = keras.Model.compute_loss, keras.Model.train_step

    def __init__(self) -> None:
        super().__init__()
        self.train_step = types.MethodType(OverRowsInStep.train_step, self)


MIXING = OverRows, OverFirstRow, OverRowsInLoss, OverRowsInStep, OverRowsInAddedLoss
MIXING += OverKnownInStep, OverNonzeroInStep, OverRowsInItsStep, OverRowsInTarget
TOLD = {**dict.fromkeys(MIXING, "other than by a mean"), SumInStep: "adds up the rows"}


@pytest.mark.parametrize("kind", [*TOLD, OverAllRows, ByRowsInLoss, ByRowsInStep, ByRowsInTarget])
def test_a_model_of_ones_own_under_strict(kind: type[keras.Model], monkeypatch) -> None:
    x = np.random.default_rng(hvd.rank()).normal(size=(8, 3))
    model = kind()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    monkeypatch.setenv("HVD_STRICT", "1")
    settings.read.cache_clear()
    refused = pytest.raises(ValueError, match=rf"{kind.__name__} .*{TOLD.get(kind)}")
    try:
        with refused if kind in TOLD else contextlib.nullcontext():
            training.fit(model, data=(x, x[:, :2]))
            assert getattr(model, "steps", 2) == 2, "trying is no step"
    finally:
        monkeypatch.undo()
        settings.read.cache_clear()


def test_labels_of_each_size_are_tried_on_a_slow_model(monkeypatch) -> None:
    clock = itertools.count(hvd.rank(), 0.24)  # four trials take a second
    monkeypatch.setattr(step_trials, "time", types.SimpleNamespace(monotonic=clock.__next__))
    model = OverLargeInStep()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model(tf.ones((4, 3)))
    batch = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 2), tf.int64)
    assert step_trials.tried(model, batch, hvd.size()).kind == "mixes"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_class(kind: str) -> None:
    wrong = {}
    for case in cases.cases(kind):
        result = compare.outcome(kind, *case)
        if result not in ("=", "random", "told") and case[1] not in cases.DIFFERENT:
            wrong[case] = result
    assert wrong == {}
