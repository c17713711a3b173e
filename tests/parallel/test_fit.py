"""Options of compile and fit: N ranks train as one process does."""

import collections
import os
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2)
optimizers = keras.optimizers


def arrays(x, y, batch):
    return {"x": x, "y": y, "batch_size": batch}


def both(make_model, feed=arrays, epochs=1, **compile_arguments):
    """Returns a model that rank 0 has trained with the whole batch, and one of all ranks."""
    alone, together = make_model(), make_model()
    for net, data, batch in (
        (together, training.mine(together), training.BATCH),
        (alone, training.data(alone, SIZE), SIZE * training.BATCH),
    ):
        if net is alone and RANK > 0:
            continue
        training.set_weights(net, seed=0)
        sgd = optimizers.SGD(0.1, momentum=0.9)
        sgd = hvd.DistributedOptimizer(sgd) if net is together else sgd
        net.compile(sgd, **{"loss": "mse", **compile_arguments})
        net.fit(**feed(*data, batch), epochs=epochs, shuffle=False, verbose=0)
    return alone, together


def assert_equal(alone, together) -> None:
    if RANK == 0:
        training.assert_close(together, alone)
    training.assert_bit_identical_on_all_ranks(together)


def test_outputs_in_a_named_tuple() -> None:
    """TensorFlow wraps such an attribute of a model, in which optimizers are looked for."""
    pair = collections.namedtuple("pair", ["one", "other"])

    def make() -> keras.Model:
        x = keras.Input((5,))
        return keras.Model(x, pair(keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)))

    def feed(x, y, batch):
        return {"x": x, "y": pair(x.sum(1), x[:, 0]), "batch_size": batch}

    alone, together = both(make, feed, loss=pair("mse", "mae"))
    assert_equal(alone, together)
    assert len(together.predict(np.ones((2, 5)))) == 2


def test_two_models_and_optimizers_that_take_turns() -> None:
    def turns(wrap, x, y, batch):
        nets = [training.dense_model() for _ in range(2)]
        for i, net in enumerate(nets):
            training.set_weights(net, seed=i)
            net.compile(optimizer=wrap(optimizers.SGD(0.1 / (i + 1), momentum=0.9)), loss="mse")
        for start in range(0, len(x), batch):
            for net in nets:
                net.train_on_batch(x[start : start + batch], y[start : start + batch])
        return nets

    x, y = training.data(training.dense_model(), SIZE)
    alone = turns(lambda optimizer: optimizer, x, y, SIZE * training.BATCH)
    together = turns(hvd.DistributedOptimizer, *training.mine(alone[0]), training.BATCH)
    for one, other in zip(alone, together, strict=True):
        assert_equal(one, other)


def test_variables_that_are_overwritten_by_their_gradient() -> None:
    """Like the scales of float8 training: the maximum over the ranks is used."""
    amax = keras.Variable(np.zeros(3, "float32"), name="amax")
    amax.overwrite_with_gradient = True
    kernel = keras.Variable(np.zeros(3, "float32"), name="kernel")
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0))
    optimizer.build([amax, kernel])
    seen = np.array([RANK, SIZE - RANK, 5.0], "float32")
    tf.function(lambda: optimizer.apply([tf.constant(seen), tf.fill([3], RANK + 1.0)]))()
    np.testing.assert_array_equal(amax, [SIZE - 1, SIZE, 5.0])
    np.testing.assert_allclose(kernel, np.full(3, -(SIZE + 1) / 2), rtol=1e-6)


class Contrast(keras.losses.Loss):
    """Compares each row with all."""

    def call(self, y_true, y_pred):
        return keras.ops.logsumexp(y_pred @ keras.ops.transpose(y_pred), -1) - y_true[:, 0]


class Divided(training.OwnStep):
    """Makes a mean of what the loss of compile adds up, or of each row's."""

    def loss_of(self, x, y):
        rows, loss = tf.cast(tf.shape(x)[0], tf.float32), super().loss_of(x, y)
        if self.how == "largest":
            return tf.reduce_mean(tf.nn.relu(loss - 0.1))
        if self.how == "variable":
            return tf.reduce_sum(loss) / self.divisor
        if self.how == "all" and hasattr(self.optimizer, "_hvd_reducer"):
            return loss / hvd.allreduce(rows, op=hvd.Sum)
        return loss if self.how == "sum" else tf.reduce_sum(loss) / rows


@pytest.mark.cases(3)
@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how",
    [
        "largest none",
        "rows none",
        "rows sum",
        "all sum",
        "sum none",
        "variable sum",
        "largest of all",
    ],
)
def test_a_step_of_its_own_that_divides_the_loss_of_compile(how: str, eager: bool) -> None:
    if eager and how in ("all sum", "variable sum"):
        pytest.skip("eager gradients do not tell of which rows a number is")

    def make() -> keras.Model:
        dense = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        net = Divided([keras.Input((5,)), *dense])
        net.how, net.divisor = how.split()[0], tf.Variable(4.0, trainable=False)
        return net

    if how == "largest of all":
        loss = Contrast(reduction="none")
    else:
        loss = keras.losses.MeanSquaredError(reduction=how.split()[1])
    assert_equal(*both(make, loss=loss, run_eagerly=eager))


class Traced(optimizers.Adam):
    """Counts how many times a step is traced."""

    traced = 0

    def apply(self, *args, **kwargs):
        self.traced += 1
        return super().apply(*args, **kwargs)


class Called(keras.Model):
    """A model whose outputs are known when it is called."""

    def __init__(self, layers):
        super().__init__()
        self.hidden, self.outputs = layers[-2:]
        self.inputs = layers[:1]
        self(np.zeros((1, 5)))

    def call(self, inputs, training=None):
        return self.outputs(self.hidden(inputs)) + 1.0


@pytest.mark.skipif(SIZE == 1, reason="on one rank, Keras makes the variables in the step")
@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["sequential", "nested", "several", "called", "frozen later"])
def test_keras_own_step_is_traced_once(kind: str) -> None:
    def make() -> keras.Model:
        x = keras.Input((5,))
        hidden, last = keras.layers.Dense(3, "sigmoid"), keras.layers.Dense(1, name="a")
        if kind == "nested":
            return keras.Model(x, {"out": last(hidden(x))})
        if kind == "several":
            return keras.Model(x, [keras.layers.Dense(1, name="b")(hidden(x)), last(hidden(x))])
        return (Called if kind == "called" else keras.Sequential)([x, hidden, last])

    def fit(ranks: int, data, wrap, average) -> tuple[keras.Model, int, dict]:
        net, adam = make(), Traced(0.01)
        training.set_weights(net, seed=0)
        x, y = data(net)
        metrics, weighted = ["mae", keras.metrics.R2Score()], ["accuracy", "cosine_similarity"]
        every = {"metrics": metrics, "weighted_metrics": weighted} if kind != "several" else {}
        net.compile(wrap(adam), "mse", **every)
        freeze = keras.callbacks.Callback()
        if kind == "frozen later":
            freeze.on_train_begin = lambda logs=None: setattr(net.layers[-2], "trainable", False)
        y = {"nested": {"out": y}, "several": {"b": y, "a": 2 * y}}.get(kind, y)
        fit = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [freeze, *average]}
        logs = net.fit(x, y, training.BATCH * ranks, **fit).history
        return net, adam.traced, logs

    alone, twice, expected = fit(SIZE, lambda net: training.data(net, SIZE), lambda o: o, [])
    average = [hvd.callbacks.MetricAverageCallback()]
    together, once, logs = fit(1, training.mine, hvd.DistributedOptimizer, average)
    assert (twice, once) == (2, 1)
    assert set(logs) == set(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values, rtol=1e-4, atol=1e-6, err_msg=key)
    training.assert_close(together, alone)


@pytest.mark.skipif(SIZE == 1, reason="one rank may use a strategy")
def test_a_strategy_of_tensorflow_is_refused() -> None:
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with pytest.raises(ValueError, match=r"a OneDeviceStrategy is in force, .* Remove `with str"):
        model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
    weight = tf.Variable(1.0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = weight * weight
        hvd.DistributedGradientTape(tape).gradient(loss, [weight])

    with pytest.raises(ValueError, match="a OneDeviceStrategy is in force"):
        strategy.run(step)


@pytest.mark.ranks(2)
def test_the_way_of_a_gradient_is_the_documented_one() -> None:
    home = str(pathlib.Path(hvd.__file__).parent) + os.sep
    shape = (7, 5)  # of the gradient that is followed
    files, returns = [], 0

    def has_it(value, depth=3) -> bool:
        if isinstance(value, (list, tuple)):
            return depth > 0 and any(has_it(part, depth - 1) for part in value)
        return isinstance(value, tf.Tensor) and value.shape == shape

    def follow(frame, event, _) -> None:
        nonlocal returns
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(home) or frame.f_code.co_name[0] == "<":
            return
        begins = frame.f_code.co_name == "_apply"  # before, the weights are broadcast
        if (files or begins) and any(map(has_it, list(frame.f_locals.values()))):
            if path not in files:
                files.append(path)
            stack, outer = [], frame.f_back
            while outer:
                stack.append(outer.f_code.co_filename)
                outer = outer.f_back
            ours = [one for one in stack if one.startswith(home)]
            returns += path in ours and path != ours[0]  # it had left this file

    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(5)])
    model.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1)), "mse")
    x, y = np.full((8, 7), RANK + 1.0, "float32"), np.ones((8, 5), "float32")
    sys.setprofile(follow)
    try:
        training.fit(model, data=(x, y), batch_size=8)
    finally:
        sys.setprofile(None)
    text = pathlib.Path(home, "..", "docs", "architecture.md").read_text()
    shown = re.findall(r"^ +\d+  hvd_keras/(\S+)", text, re.MULTILINE)
    assert [path.removeprefix(home) for path in files] == shown
    assert len(files) <= 9
    assert returns <= 2
