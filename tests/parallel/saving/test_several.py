"""Restarts of scripts with several models, optimizers, fits or data, and of other batches."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import missing_calls
from tests.harness.training import Crash, OwnStep, compiled, fit
from tests.parallel import test_metrics

pytestmark = pytest.mark.ranks(2, 3)
RANK, SIZE = hvd.rank(), hvd.size()
BATCH, STEPS = 4, 4
SGD = keras.optimizers.SGD
BROADCAST = hvd.callbacks.BroadcastGlobalVariablesCallback


@pytest.fixture
def directory(directory):
    return directory / "checkpoints"


def rows(seed: int = 3):
    random = np.random.default_rng(seed)
    x = random.normal(size=(SIZE * BATCH * STEPS, 5)).astype("float32")
    return x, x.sum(1, keepdims=True)


def mine():
    return [part[RANK::SIZE] for part in rows()]


def dense(units: int = 1, **more) -> keras.Model:
    layer = keras.layers.Dense(units, kernel_initializer=keras.initializers.RandomUniform(seed=1))
    return keras.Sequential([keras.Input((5,)), layer], **more)


class Outer(keras.Model):
    """Trains a model within it by that one's optimizer, and another by one in a nested dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = dense(), dense()
        self.inner.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
        self.own = {"of": {"other": hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))}}

    def call(self, x):
        return self.inner(x) + self.other(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        pairs = (self.inner, self.inner.optimizer), (self.other, self.own["of"]["other"])
        for model, optimizer in pairs:
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Head(keras.layers.Layer):
    """A layer that has its optimizer, as in a GAN that is made of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.adam = dense(), keras.optimizers.Adam(0.05)

    def call(self, x):
        return self.dense(x)


class Heads(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.heads = [Head(), Head()]

    def call(self, x):
        return self.heads[0](x) + self.heads[1](x)

    def train_step(self, data):
        x, y = data
        for head in self.heads:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = head.trainable_variables
            head.adam.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def heads() -> keras.Model:
    model = Heads()
    model(np.zeros((1, 5)))
    model.compile(run_eagerly=True)
    return model


def outer() -> keras.Model:
    model = Outer()
    model(np.zeros((1, 5)))
    model.compile(run_eagerly=True)
    return model


def stateful() -> keras.Model:
    ones = {"kernel_initializer": "ones"}
    rnn = keras.layers.SimpleRNN(3, stateful=True, recurrent_initializer="ones", **ones)
    layers = [keras.Input((5, 1), batch_size=BATCH), rnn, keras.layers.Dense(1, **ones)]
    return compiled(keras.Sequential(layers), run_eagerly=True)


def result(model) -> np.ndarray:
    states = [np.ravel(v) for layer in model.layers for v in getattr(layer, "states", None) or ()]
    return np.concatenate([*(w.ravel() for w in model.get_weights()), *states])


@pytest.mark.parametrize("make", [outer, heads, stateful])
def test_optimizers_within_and_recurrent_states(make, directory) -> None:
    x, y = mine()

    def run(folder: str, *more) -> keras.Model:
        model = make()
        saved = hvd.callbacks.Checkpoint(directory / folder, save_freq=2)
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, saved, *more, data=(x, y), batch_size=BATCH, epochs=2)
        return model

    undisturbed = run("all")
    run("some", Crash(STEPS + 3))
    np.testing.assert_array_equal(result(run("some")), result(undisturbed))


@pytest.mark.cases(2)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (4, 16)])
@pytest.mark.parametrize("repeats", [False, True])
def test_batches_of_another_size(sizes, repeats: bool, directory) -> None:
    """No row is left out; a warning says what is used again."""
    number = 16
    x = np.arange(float(number * SIZE))[:, np.newaxis]
    seen: list[float] = []

    def run(size: int, *more) -> None:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(SGD(0.0)), loss, run_eagerly=True)
        saved = hvd.callbacks.Checkpoint(directory, save_freq=1)
        data = {"x": x[RANK::SIZE], "y": x[RANK::SIZE], "batch_size": size, "shuffle": False}
        if repeats:
            shard = hvd.data.shard((x, x), batch_size=size, shuffle=False)
            data = {"x": shard.repeat(), "steps_per_epoch": number // size}
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(**data, verbose=0, callbacks=[saved, *more])

    def loss(y, predicted):
        seen.extend(np.ravel(y).tolist())
        return tf.reduce_mean((y - predicted) ** 2)

    run(sizes[0], Crash(2))
    seen.clear()
    done = x[RANK::SIZE][: sizes[0]].ravel().tolist()
    is_whole = sizes[0] % sizes[1] == 0
    warns = not (repeats or is_whole or RANK)
    with pytest.warns(UserWarning, match="used again") if warns else contextlib.nullcontext():
        run(sizes[1])
    # A trial of the loss has labels of its own: -1, 0, 1 and 2.
    assert not is_whole or not {*done} & {*seen} - {-1, 0, 1, 2}
    assert {*done, *seen} >= {*x[RANK::SIZE].ravel().tolist()}


def test_rates_of_two_optimizers_on_fewer_ranks(directory) -> None:
    def run(of, *more) -> keras.Model:
        model = dense()
        model.compile(hvd.DistributedOptimizer(SGD(0.01 * of.size()), process_set=of), "mse")
        model.second = hvd.DistributedOptimizer(SGD(0.02 * of.size()), process_set=of)
        model.second.build(model.trainable_variables)
        saved = hvd.callbacks.Checkpoint(directory, process_set=of)
        reduce = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: halve(model) if epoch == 1 else None
        )
        for epochs in (2, 3):  # of one instance; the second begins with the reduced rates
            with contextlib.suppress(KeyboardInterrupt):
                options = {"epochs": epochs, "batch_size": BATCH, "verbose": 0}
                model.fit(*mine(), callbacks=[saved, reduce, *more], **options)
        return model

    def halve(model) -> None:
        for optimizer in (model.optimizer, model.second):
            optimizer.learning_rate = optimizer.learning_rate * 0.5

    run(hvd.global_process_set, Crash(3 * STEPS + 2))
    fewer = hvd.add_process_set([0])
    if RANK == 0:
        model = run(fewer)
        rates = [float(one.learning_rate) for one in (model.optimizer, model.second)]
        # Halved in the first fit and in the second.
        np.testing.assert_allclose(rates, [0.01 / 4, 0.02 / 4], rtol=1e-6)


def test_a_schedule_goes_on_by_rows_on_fewer_ranks(directory, capfd) -> None:
    fewer, epochs = hvd.add_process_set([0]), 3

    def run(of, folder: str, *more) -> list[int]:
        """Returns how many steps before its end the schedule is, in each step."""
        left: list[int] = []
        steps = epochs * STEPS * SIZE // of.size()
        decay = keras.optimizers.schedules.PolynomialDecay(0.1, steps, 0.0)
        model, sgd = dense(), SGD(decay, gradient_accumulation_steps=2)
        scaled = keras.optimizers.LossScaleOptimizer(sgd)
        model.compile(hvd.DistributedOptimizer(scaled, process_set=of), "mse")
        model.also = sgd  # counts once
        data = hvd.data.shard(rows(), batch_size=BATCH, process_set=of)
        saved = hvd.callbacks.Checkpoint(directory / folder, save_freq=1, process_set=of)
        note = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: left.append(
                round(float(sgd.learning_rate) / 0.1 * steps)
            )
        )
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(data, epochs=epochs, verbose=0, callbacks=[saved, note, *more])
        return left

    run(hvd.global_process_set, "some", Crash(STEPS + 2))
    if RANK == 0:
        undisturbed, left = run(fewer, "all"), run(fewer, "some")
        assert f", epoch 2 of {epochs}, batch {SIZE + 1}\n" in capfd.readouterr().err
        assert undisturbed == [*range(epochs * STEPS * SIZE, 0, -1)]
        # An odd number of steps was done: one of two gradients is summed up already.
        assert len(left) == SIZE * (2 * STEPS - 1)
        assert left == [number + (SIZE + 1) % 2 for number in undisturbed[-len(left) :]]


def test_fits_of_two_models_of_trained_layers_and_of_two_data_in_turn(directory) -> None:
    """A layer is frozen in the first fit; the order of shuffled data goes on in the third."""

    def run(folder: str, *more) -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), *(dense().layers + dense(1).layers)[:1]])
        model.add(keras.layers.Dense(1, kernel_initializer="ones"))
        data = [hvd.data.shard(rows(seed), batch_size=BATCH) for seed in (1, 2)]
        saved = hvd.callbacks.Checkpoint(directory / folder, save_freq=1)
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(4):
                model.layers[0].trainable = number > 0
                if number < 2:
                    compiled(model, SGD(0.01, momentum=0.9), run_eagerly=True)
                fit(model, saved, *more, data=data[number % 2])
        return model

    undisturbed = run("all")
    run("some", Crash(STEPS + 2))
    np.testing.assert_array_equal(result(run("some")), result(undisturbed))


def test_a_rank_may_load_a_model_for_itself(directory) -> None:
    for fold in range(2):
        model = dense()
        model.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse")
        path = directory / f"{fold}.keras"
        best = keras.callbacks.ModelCheckpoint(path)
        model.fit(*mine(), verbose=0, callbacks=[BROADCAST(0), best])
        if RANK == 0:
            np.testing.assert_array_equal(
                hvd.load_model(path).get_weights()[0], model.get_weights()[0]
            )


def test_a_model_around_a_distributed_one_may_train_alone() -> None:
    within = dense()
    within.compile(hvd.DistributedOptimizer(SGD(0.01)), "mse")
    within.fit(*mine(), batch_size=BATCH, verbose=0, callbacks=[BROADCAST(0)])
    before = within.get_weights()[0]
    if RANK == 0:  # it waits for no other
        probe = keras.Sequential([keras.Input((5,)), within, keras.layers.Dense(1)])
        probe.compile("sgd", "mse")
        with hvd.local_fit():
            probe.fit(*mine(), verbose=0)
        assert (within.get_weights()[0] != before).any()


def test_a_file_within_an_accumulation_has_the_sums_of_all_ranks(directory) -> None:
    path = directory.parent / "model.keras"

    def train(x, y, size: int, **more) -> keras.Model:
        sgd = SGD(0.1, gradient_accumulation_steps=STEPS)
        model = dense()
        model.compile(hvd.DistributedOptimizer(sgd) if more else sgd, "mse")
        model.fit(x, y, size * BATCH, shuffle=False, verbose=0, **more)
        return model

    checkpoint = keras.callbacks.ModelCheckpoint(path, save_freq=STEPS - 1)
    whole = train(*mine(), 1, callbacks=[BROADCAST(0), checkpoint])
    x, y = (
        np.concatenate([p[r::SIZE][BATCH * i :][:BATCH] for i in range(STEPS) for r in range(SIZE)])
        for p in rows()
    )
    rows_of_file = SIZE * BATCH * (STEPS - 1)
    expected, loaded = (
        train(x[:rows_of_file], y[:rows_of_file], SIZE),
        keras.models.load_model(path),
    )
    for one, other in zip(loaded.optimizer.variables, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=one.path)
    np.testing.assert_allclose(
        whole.get_weights()[0], train(x, y, SIZE).get_weights()[0], rtol=1e-5
    )


HOW = [  # and by how much of the mean over ranks a step changes the weight
    ({"backward_passes_per_step": 2}, 1),
    (
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True, "shard_state": True},
        0.5,
    ),
    ({"op": hvd.Sum}, SIZE),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("how", "factor"), HOW)
def test_updates_of_a_loaded_model_are_as_large_as_before(
    how, factor, directory, monkeypatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(missing_calls, "tell", lambda text, *_: told.append(text))

    def change(model: keras.Model) -> float:
        """Each gradient of the weight is the mean of x."""
        before = model.get_weights()[0].item()
        x = np.full((STEPS * BATCH, 1), RANK + 1.0)
        model.fit(x, x + 1e3, batch_size=BATCH, verbose=0, callbacks=[BROADCAST(0)])
        return float(model.get_weights()[0].item() - before)

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(hvd.DistributedOptimizer(SGD(0.1), **how), "mae")
    expected = change(model)
    assert expected == pytest.approx(0.1 * STEPS * (SIZE + 1) / 2 * factor, rel=1e-4)
    path = directory.parent / "model.keras"
    hvd.save_model(model, path) if "shard_state" in how else model.save(path)
    hvd.barrier()
    assert change(hvd.load_model(path, **how)) == pytest.approx(expected, rel=1e-4)
    loaded = keras.models.load_model(path)
    hvd.DistributedOptimizer(loaded.optimizer, **{**how, "shard_state": False})
    assert change(loaded) == pytest.approx(expected, rel=1e-4)
    assert not told
    hvd.load_model(path)
    assert len(told) == ("op" not in how)
    assert all("backward_passes_per_step=2, updates took their sum" in text for text in told)


class Taped(OwnStep):
    def tape(self, tape):
        return hvd.DistributedGradientTape(tape, process_set=self.of)


def test_a_tape_has_the_set_of_a_checkpoint_wherever_that_stands(directory) -> None:
    of, other = sets = [hvd.add_process_set(range(i, SIZE - 1 + i)) for i in (1, 0)]
    saved = [hvd.callbacks.Checkpoint(directory, process_set=one) for one in sets]
    for callbacks in ([saved[0], BROADCAST(1)], [BROADCAST(1), saved[0]], saved):
        model = Taped([keras.Input((5,)), keras.layers.Dense(1)])
        model.of = of
        model.compile(SGD(0.1), "mse")
        if of.included():
            differ = pytest.raises(ValueError, match=f"process sets: {of}, {other}")
            with differ if callbacks is saved else contextlib.nullcontext():
                model.fit(*mine(), batch_size=BATCH, verbose=0, callbacks=callbacks)


class Highest(test_metrics.Highest):
    """Of the labels; its state is no sum."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred, y_true)


@pytest.mark.parametrize("metric", ["mae", Highest])
def test_metrics_of_an_interrupted_epoch_on_fewer_ranks(metric, directory) -> None:
    """Sums go on; of others those of the remaining batches are known."""
    y = np.arange(SIZE * BATCH * STEPS, 0.0, -1)[:, np.newaxis]
    fewer, is_sum = hvd.add_process_set([0]), metric == "mae"

    def run(of, *more) -> dict[str, list[float]]:
        layer = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((5,)), layer])
        optimizer = hvd.DistributedOptimizer(SGD(0.0), process_set=of)
        model.compile(optimizer, "mse", metrics=[metric if is_sum else metric()])
        size = SIZE * BATCH // of.size()
        data = hvd.data.shard((rows()[0], y), batch_size=size, shuffle=False, process_set=of)
        saved = hvd.callbacks.Checkpoint(directory, save_freq=1, process_set=of)
        return model.fit(data, verbose=0, callbacks=[saved, *more]).history

    with pytest.raises(KeyboardInterrupt):
        run(hvd.global_process_set, Crash(2))
    if RANK == 0:
        text = "state of Highest is not known to be a sum over samples, so the metrics of this"
        with contextlib.nullcontext() if is_sum else pytest.warns(UserWarning, match=text):
            logs = run(fewer)
        # Saved after one step: a crash in the second one.
        rest = y[SIZE * BATCH :]
        assert logs["mae" if is_sum else "highest"] == [y.mean() if is_sum else rest.max()]


def test_an_attribute_that_differs_by_rank_does_not_go_on_on_fewer_ranks(directory) -> None:
    fewer = hvd.add_process_set([0])

    def run(of, epochs: int) -> None:
        model = dense()
        model.layers[0].seen = [[tf.Variable(float(RANK), trainable=False)]]
        model.compile(hvd.DistributedOptimizer(SGD(0.1), process_set=of), "mse")
        saved = hvd.callbacks.Checkpoint(directory, process_set=of)
        model.fit(*mine(), epochs=epochs, verbose=0, callbacks=[saved])

    run(hvd.global_process_set, 1)
    if RANK == 0:
        with pytest.raises(ValueError, match=rf"seen\[0\]\[0\] differs between the {SIZE} ranks"):
            run(fewer, 2)
