"""What a script has called before changes neither what ``fit`` computes nor what it tells."""

import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import training
from tests.parallel.features.test_feature_pairs import assert_equal_on_all_ranks, by_rank, rows_of

RANK, SIZE = hvd.rank(), hvd.size()
BROADCAST = hvd.callbacks.BroadcastGlobalVariablesCallback
ALONE = "gradients of this rank alone"
X, Y = rows_of(RANK)
ALIKE = {"verbose": 0, "shuffle": False}


def sgd(rate: float = 0.1):
    return keras.optimizers.SGD(rate)


def compiled(optimizer, *layers, **options) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    training.set_weights(model, seed=3)
    model.compile(optimizer, "mse", **options)
    return model


def told(warned: list[str], text: str) -> bool:
    """On any rank."""
    found = any(text in one for one in warned)
    warned.clear()
    return any(hvd.allgather_object(found))


def step_of(optimizer, variables, wrap, loss) -> None:
    with tf.GradientTape() as tape:
        value = loss()
    optimizer.apply(wrap(tape).gradient(value, variables), variables)


# Forgotten lines.


def test_what_was_exchanged_once_excuses_no_later_step(warned) -> None:
    model = compiled(hvd.DistributedOptimizer(sgd()))
    model.fit(X, Y, callbacks=[BROADCAST(0)], **ALIKE)
    assert not told(warned, ALONE)
    model.compile(sgd(), "mse")
    model.train_on_batch(X, Y)
    assert told(warned, ALONE)


def test_a_step_that_was_traced_in_local_fit_excuses_no_other(warned) -> None:
    model = compiled(sgd())
    with hvd.local_fit():
        model.fit(X, Y, **ALIKE)
    assert not told(warned, ALONE)
    model.fit(X, Y, **ALIKE)
    assert told(warned, ALONE)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_tape_for_some_variables_excuses_no_others(in_graph: bool, warned) -> None:
    a, b = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = sgd()
    optimizer.build([a, b])

    def step(complete: bool) -> None:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(a * b * (RANK + 1.0))
        plain = tape.gradient(loss, b)
        tape = hvd.DistributedGradientTape(tape)
        pairs = [(tape.gradient(loss, a), a), (tape.gradient(loss, b) if complete else plain, b)]
        optimizer.apply_gradients(pairs)

    for complete in (True, False):
        (tf.function(step) if in_graph else step)(complete)
        assert told(warned, ALONE) != complete


def test_gradients_that_were_averaged_once_excuse_no_other_function(warned) -> None:
    variable, optimizer = tf.Variable([1.0]), sgd()
    optimizer.build([variable])
    for averages in (True, False):

        @tf.function
        def step(averages=averages) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * (RANK + 1.0))
            gradient = tape.gradient(loss, variable)
            optimizer.apply([hvd.allreduce(gradient) if averages else gradient], [variable])

        step()
        assert told(warned, ALONE) != averages


@pytest.mark.parametrize("apply_in", ["eager", "functions"])
def test_a_tape_in_a_function_may_serve_several_updates(apply_in: str, warned) -> None:
    """Gradients are added up by hand; the noise of this rank's is only logged."""
    variable, total = tf.Variable([1.0]), tf.Variable([0.0])
    loss = lambda: tf.reduce_sum(variable * (RANK + 1.0))  # noqa: E731

    @tf.function
    def add() -> None:
        with tf.GradientTape() as tape:
            value = loss()
        total.assign_add(hvd.DistributedGradientTape(tape).gradient(value, variable))

    for optimizer in (sgd(), sgd()):
        optimizer.build([variable])
        for number in (2.0, 1.0):  # traced again

            def apply(number=number, optimizer=optimizer) -> None:
                optimizer.apply([total / number], [variable])

            add()
            with tf.GradientTape() as tape:
                value = loss()
            assert tape.gradient(value, variable) == RANK + 1
            (apply if apply_in == "eager" else tf.function(apply))()
    assert not told(warned, ALONE)


def test_another_models_options_are_compared_in_a_callback(warned) -> None:
    other = compiled(hvd.DistributedOptimizer(sgd(0.1 * (RANK + 1))))
    hvd.broadcast_variables(other.variables, 0)
    trains = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: other.train_on_batch(X, Y))
    model = compiled(hvd.DistributedOptimizer(sgd()))
    model.fit(X, Y, callbacks=[BROADCAST(0), trains], **ALIKE)
    assert told(warned, "different learning rates")


def test_a_tape_in_fit_needs_a_callback(warned) -> None:
    class Own(training.OwnStep):
        tape = staticmethod(hvd.DistributedGradientTape)

    model = Own([keras.Input((3,)), keras.layers.Dense(1)])
    hvd.broadcast_variables(model.variables, 0)
    model.compile(sgd(), "mse")
    for callbacks in ([], [BROADCAST(0)]):
        model.fit(X, Y, callbacks=callbacks, **ALIKE)
        assert told(warned, "fit does not know that several ranks") != bool(callbacks)


def test_a_loss_that_is_only_logged_is_not_told(warned) -> None:
    model = compiled(sgd())
    hvd.broadcast_variables(model.variables, 0)
    optimizer = hvd.DistributedOptimizer(sgd())
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    loss(Y, model(X), np.arange(len(Y)) + RANK)
    weights = model.trainable_variables
    step_of(optimizer, weights, lambda tape: tape, lambda: tf.reduce_mean((model(X) - Y) ** 2))
    assert not warned


# Results.


def test_a_fit_within_a_fit() -> None:
    """The ranks' batches differ in size in one of them."""
    sizes = [6, 2] * SIZE
    count = 4 * sum(sizes[:SIZE])
    random = np.random.default_rng(1)
    x = random.normal(size=(count, 3))
    y = x.sum(1, keepdims=True) + 1
    first = slice(4 * sum(sizes[:RANK]), 4 * sum(sizes[: RANK + 1]))
    unequal = x[first], y[first], sizes[RANK]

    def trained(is_outer_unequal: bool, is_nested: bool) -> np.ndarray:
        model = compiled(hvd.DistributedOptimizer(sgd(0.05)), jit_compile=False)
        outer, inner = [unequal, (X, Y, 4)][:: 1 if is_outer_unequal else -1]

        def fit(x, y, size, *more) -> None:
            model.fit(x, y, batch_size=size, callbacks=[BROADCAST(0), *more], **ALIKE)

        def again(epoch, logs=None) -> None:
            fit(*inner)

        fit(*outer, *[keras.callbacks.LambdaCallback(on_epoch_end=again)] * is_nested)
        if not is_nested:
            fit(*inner)
        fit(*outer)
        return training.flat(model)

    for which in (False, True):
        np.testing.assert_allclose(trained(which, True), trained(which, False), rtol=1e-5)


class Helped(training.OwnStep):
    """Calls a function of the script in training and in validation."""

    @tf.function
    def total(self, y, y_pred):
        return keras.losses.Dice()(y, y_pred)

    def loss_of(self, x, y):
        return self.total(y, self(x, training=True))

    def test_step(self, data):
        return {"loss": self.total(data[1], self(data[0]))}


def test_training_and_validation_trace_a_function_apart() -> None:
    def trained(evaluates: bool) -> list[np.ndarray]:
        model = Helped([keras.Input((3,)), keras.layers.Dense(1)])
        training.set_weights(model, seed=3)
        model.compile(hvd.DistributedOptimizer(sgd()))
        if evaluates:
            model.evaluate(X, Y, verbose=0)
        model.fit(X, Y, callbacks=[BROADCAST(0)], **ALIKE)
        if RANK == 0:
            model.evaluate(X, Y, verbose=0)
        return model.get_weights()

    for one, other in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    # A script's parameters may have any names.
    assert int(tf.function(lambda call, function: call + function)(call=1, function=2)) == 3


def test_a_function_that_is_made_in_each_eager_step_is_forgotten() -> None:
    made = []

    class Anew(training.OwnStep):
        def loss_of(self, x, y):
            squares = tf.function(lambda y_pred: (y - y_pred) ** 2)
            made.append(weakref.ref(squares))
            return tf.reduce_mean(squares(self(x)))

    model = Anew([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(sgd()), run_eagerly=True)
    model.fit(X, Y, 4, callbacks=[BROADCAST(0)], **ALIKE)
    gc.collect()
    assert len(made) > 1
    assert not any(function() for function in made)


def test_one_rank_evaluates_at_the_end_of_a_validation() -> None:
    seen: list[float] = []

    def more(logs=None) -> None:
        if RANK == 0:
            seen.append(model.evaluate(X, Y, verbose=0))

    look = keras.callbacks.LambdaCallback()
    look.on_test_end = more
    model = compiled(hvd.DistributedOptimizer(sgd(0.0)))
    callbacks = [BROADCAST(0), hvd.callbacks.MetricAverageCallback(), look]
    logs = model.fit(X, Y, epochs=2, validation_data=(X, Y), callbacks=callbacks, **ALIKE).history
    mine = float(np.mean((model(X) - Y) ** 2))
    assert seen == (pytest.approx([mine] * 2) if RANK == 0 else [])
    assert logs["val_loss"] == pytest.approx([by_rank([[mine]]).mean()] * 2)


@pytest.mark.parametrize("eager", [False, True])
def test_normalization_that_is_adapted_between_two_fits(eager: bool) -> None:
    layer = keras.layers.Normalization()
    layer.adapt(X)
    model = compiled(hvd.DistributedOptimizer(sgd(0.0)), layer, run_eagerly=eager)
    losses = []
    for scale in (1, 3 + RANK):  # afterwards all have what rank 0 has learnt
        layer.adapt(X * scale)
        logs = model.fit(X * 0 + 1, Y * 0, callbacks=[BROADCAST(0)], **ALIKE).history
        losses.append(logs["loss"])
    assert_equal_on_all_ranks([losses[1]])
    assert losses[0] != losses[1]


def test_layers_that_are_local_no_longer() -> None:
    model = compiled(sgd(), keras.layers.Dense(2))
    head, weights = model.layers[-1], model.trainable_variables
    hvd.broadcast_variables(model.variables, 0)
    partial_tape = functools.partial(hvd.PartialDistributedGradientTape, local_layers=head)
    step_of(sgd(), weights, partial_tape, lambda: tf.reduce_mean((model(X) - Y) ** 2))
    for partial in (False, True, False, True):
        optimizer = hvd.DistributedOptimizer(sgd())
        if partial:
            optimizer = hvd.PartialDistributedOptimizer(sgd(), local_layers=head)
        model.compile(optimizer, "mse")
        model.fit(X, Y, callbacks=[BROADCAST(0)], **ALIKE)
        kernels = by_rank([head.kernel])
        assert (kernels[0] == kernels[1]).all() != partial


def test_tapes_and_then_a_distributed_optimizer() -> None:
    """What tapes have returned in eager code says nothing about a function's gradients."""
    weight = tf.Variable([1.0])
    loss = lambda: tf.reduce_sum(weight * (RANK + 1.0))  # noqa: E731
    for _ in range(3):
        step_of(sgd(), [weight], hvd.DistributedGradientTape, loss)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, weight)

    before = weight.numpy()
    hvd.DistributedOptimizer(sgd(1.0)).apply_gradients([(gradient(), weight)])
    np.testing.assert_allclose(weight, before - (SIZE + 1) / 2, rtol=1e-6)


def test_one_rank_validates_in_an_eager_fit_with_a_function_of_the_scripts() -> None:
    class Timed(keras.Sequential):
        calls = 0

        def make_train_function(self, force=False):
            super().make_train_function(force)
            if self.train_function != self.timed:
                self.made, self.train_function = self.train_function, self.timed

        def timed(self, iterator):
            self.calls += 1
            return self.made(iterator)

    model = Timed([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    validation = (X, Y) if RANK == 0 else None
    model.fit(X, Y, epochs=2, validation_data=validation, callbacks=[BROADCAST(0)], **ALIKE)
    assert model.calls == 2
    assert_equal_on_all_ranks(model.get_weights())


def test_loss_scales_behind_a_tape_with_a_divided_table() -> None:
    """The gradient of one rank's part is infinite: all skip the step."""
    table = hvd.layers.Embedding(4, 2, shard="rows")
    table.build()
    other = tf.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0)
    optimizer.build([table.embeddings, other])
    gradients = [tf.fill(table.embeddings.shape, np.inf if RANK else 1.0), tf.ones(1)]
    optimizer.apply(gradients, [table.embeddings, other])
    assert float(other[0]) == 1.0
    assert float(optimizer.dynamic_scale) == 2.0
