"""What differs between ranks is an error, or told, before it can harm a training."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import training
from tests.harness.training import compiled, fit

RANK, SIZE = hvd.rank(), hvd.size()
optimizers = keras.optimizers
LAST = RANK == SIZE - 1


def by_rank(one, other):
    return other if LAST else one


SGD, Adam = optimizers.SGD, optimizers.Adam
DECAY = optimizers.schedules.ExponentialDecay

# What each rank has; and what the error says of it.
OPTIMIZERS = {
    "momentum": (lambda: SGD(0.1, momentum=by_rank(0.9, 0.8)), ("momentum", "0.9", "0.8")),
    "nesterov": (lambda: SGD(momentum=0.9, nesterov=by_rank(True, False)), ("nesterov", "True")),
    "epsilon": (lambda: Adam(epsilon=by_rank(1e-7, 1e-3)), ("epsilon", "1e-07", "0.001")),
    "decay": (lambda: optimizers.AdamW(weight_decay=by_rank(0.1, 0.2)), ("weight_decay", "0.2")),
    "clipnorm": (lambda: SGD(clipnorm=by_rank(None, 0.5)), ("clipnorm", "None", "0.5")),
    "global": (lambda: SGD(global_clipnorm=by_rank(None, 1.0)), ("global_clipnorm", "1.0")),
    "ema": (lambda: SGD(use_ema=True, ema_momentum=by_rank(0.9, 0.5)), ("ema_momentum", "0.5")),
    "schedule": (lambda: SGD(DECAY(0.1, 10, by_rank(0.9, 0.5))), ("decay_rate", "0.5")),
    "class": (
        lambda: by_rank(optimizers.RMSprop, optimizers.Adagrad)(0.1),
        ("optimizer", "RMSprop", "Adagrad"),
    ),
}


@pytest.mark.parametrize("how", ["fit", "loop"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_differ(name: str, how: str) -> None:
    make, told = OPTIMIZERS[name]
    optimizer = make()
    if how == "fit":
        model = compiled(optimizer=optimizer)
        train = functools.partial(fit, model)
    else:
        variable = tf.Variable([float(RANK)], name="v")
        distributed = hvd.DistributedOptimizer(optimizer)
        train = functools.partial(distributed.apply, [tf.constant([1.0])], [variable])
    with pytest.raises(ValueError, match="The ranks train different models") as error:
        train()
    for text in (*told, f"rank {SIZE - 1} has"):
        assert text in str(error.value)
    assert "learning_rate" not in str(error.value) or name == "schedule"


def net(**arguments) -> keras.Model:
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, **arguments)])


MODELS = {
    "loss": (lambda: compiled(loss=by_rank("mse", "mae")), "'mae'"),
    "delta": (lambda: compiled(loss=keras.losses.Huber(by_rank(1.0, 2.0))), "delta"),
    "weights": (lambda: compiled(loss_weights=[by_rank(1.0, 2.0)]), "loss_weights"),
    "run_eagerly": (lambda: compiled(run_eagerly=by_rank(False, True)), "run_eagerly"),
    "jit_compile": (lambda: compiled(jit_compile=by_rank(False, True)), "jit_compile"),
    "at once": (lambda: compiled(steps_per_execution=by_rank(1, 2)), "steps_per_execution"),
    "activation": (lambda: compiled(model=net(activation=by_rank("relu", "tanh"))), "activation"),
    "regularizer": (
        lambda: compiled(model=net(kernel_regularizer=keras.regularizers.L2(by_rank(0.1, 0.2)))),
        "kernel_regularizer",
    ),
    "constraint": (
        lambda: compiled(model=net(kernel_constraint=by_rank(None, keras.constraints.NonNeg()))),
        "NonNeg",
    ),
    "policy": (lambda: compiled(model=net(dtype=by_rank("float32", "mixed_bfloat16"))), "bfloat16"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_differ(name: str) -> None:
    make, told = MODELS[name]
    with pytest.raises(ValueError, match="The ranks train different models") as error:
        fit(make())
    assert told in str(error.value)


def own_step(factor: float) -> keras.Model:
    class Scaled(training.OwnStep):
        def loss_of(self, x, y):
            return factor * tf.reduce_mean((self(x) - y) ** 2)

    return Scaled([keras.Input((5,)), keras.layers.Dense(1)])


def scaled(factor: float):
    def activation(rows):
        return rows * factor

    return activation


def scaled_loss(factor: float):
    return lambda y, y_pred: keras.ops.mean((y - y_pred) ** 2 * tf.constant([factor]))


FUNCTIONS = {
    "loss": lambda factor: compiled(loss=scaled_loss(factor)),
    "activation": lambda factor: compiled(model=net(activation=scaled(factor))),
    "operation": lambda factor: compiled(
        keras.Model(inputs := keras.Input((5,)), keras.layers.Dense(1)(inputs / factor))
    ),
    "step": lambda factor: compiled(own_step(factor)),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_in_functions_that_differ(name: str, differs: bool, warned) -> None:
    fit(FUNCTIONS[name](by_rank(2.0, 3.0) if differs else 2.0))
    told = [text for text in warned if "compute different functions" in text]
    assert len(told) == (differs and RANK == 0)
    assert all(re.search(r" = \[?2\..* = \[?3\.", text) for text in told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch_size": by_rank(4, 2)}, "different numbers of batches"),
        ({"epochs": by_rank(1, 2)}, "epochs: "),
        (
            {"steps_per_epoch": by_rank(2, 3)},
            "different numbers of batches per epoch: rank 0 has 2",
        ),
        ({"class_weight": {0: by_rank(1.0, 2.0)}}, "class_weight"),
    ],
)
def test_arguments_of_fit_that_differ(arguments: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fit(compiled(), **arguments)


def test_what_may_differ() -> None:
    """Names, seeds, learning rates and initial values; a rank may validate alone."""
    for _ in range(RANK):  # Keras counts
        training.dense_model()
    rate = 0.1 * (RANK + 1)
    dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=RANK))
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5, seed=RANK), dense])
    data = training.mine(model) if RANK == 0 else None
    fit(compiled(model, SGD(rate)), verbose=by_rank(0, 2), validation_data=data)
    training.assert_bit_identical_on_all_ranks(model)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)


CHANGES = {
    "permuted": lambda values: values[::-1],
    "swapped halves": lambda values: np.roll(values, len(values) // 2, axis=0),
    "negated": lambda values: -values,
    "rows swapped in pairs": lambda values: values.reshape(-1, 2, *values.shape[1:])[:, ::-1],
    "one bit": lambda values: np.where(values == values.flat[0], np.nextafter(values, 9), values),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CHANGES)
def test_values_with_equal_sums_are_told_apart(change, directory, warned) -> None:
    """In broadcasts, checks of weights, data, and checkpoints."""
    values = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
    mine = CHANGES[change](values).reshape(8, 4).astype("float32") if LAST else values
    with pytest.raises(ValueError, match="different"):
        hvd.data.shard(mine, batch_size=1)

    def made() -> keras.Model:
        layer = keras.layers.Dense(4, use_bias=False)
        model = keras.Sequential([keras.Input((8,)), layer])
        model.set_weights([mine])
        return compiled(model, SGD(0.0))

    x, y = np.ones((2, 8), "float32") * (RANK + 1), np.ones((2, 4), "float32")
    made().fit(x, y, verbose=0, shuffle=False)
    assert (RANK > 0) or any("began to train with different weights" in t for t in warned)

    def verify(batch, logs) -> None:
        model.set_weights([mine])

    model = made()
    changing = keras.callbacks.LambdaCallback(on_train_batch_end=verify)
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(RuntimeError, match="VerifyWeights"):
        model.fit(x, y, verbose=0, callbacks=[first, changing, hvd.callbacks.VerifyWeights(1)])

    local, again = made(), made()
    again.set_weights([np.zeros((8, 4))])
    for net in (local, again):
        for variable in net.trainable_variables:  # saved for each rank
            net.optimizer.register_local_var(variable)
        net.fit(x, y, verbose=0, callbacks=[hvd.callbacks.Checkpoint(directory / change)])
    np.testing.assert_array_equal(again.get_weights()[0], mine)
