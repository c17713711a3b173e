"""Local layers, gradients that exist in some steps only, unusual optimizers, process sets."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import specs
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(2, 3)
ROWS = 8  # per rank


def share(seed=0, columns=5):
    """Returns this rank's rows, and all ranks' rows in rank order."""
    everyone = np.random.default_rng(seed).normal(size=(SIZE * ROWS, columns)).astype("float32")
    return everyone[RANK * ROWS : (RANK + 1) * ROWS], everyone


class TwoHeads(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = keras.layers.Dense(4, activation="tanh")
        self.heads = [keras.layers.Dense(1), keras.layers.Dense(1)]

    def build(self, shape) -> None:
        self.trunk.build(shape)
        for head in self.heads:
            head.build((None, 4))

    def call(self, x, head=0):
        return self.heads[head](self.trunk(x))


def two_heads() -> TwoHeads:
    model = TwoHeads()
    model(tf.zeros((1, 5)))
    training.set_weights(model, seed=3)
    return model


def make_step(model, optimizer, tape_of, compiled):
    def step(x, head):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, head=head) - 1.0) ** 2)
        gradients = tape_of(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return tf.function(step) if compiled else step


@pytest.mark.parametrize("compiled", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("by_tape", [True, False], ids=["tape", "optimizer"])
def test_two_losses_in_turn(compiled, by_tape) -> None:
    """A head that no rank has used in a step does not change, not even by its momentum."""
    mine, everyone = share()
    together, alone = two_heads(), two_heads()
    sgd, own = (keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    if not by_tape:
        sgd = hvd.DistributedOptimizer(sgd)
    tape_of = hvd.DistributedGradientTape if by_tape else lambda tape: tape
    sgd.build(together.trainable_variables)
    own.build(alone.trainable_variables)
    step = make_step(together, sgd, tape_of, compiled)
    with hvd.local_fit():
        step_alone = make_step(alone, own, lambda tape: tape, compiled)
        for head in (0, 1, 0, 0, 1):
            before = together.heads[1 - head].get_weights()
            step(tf.constant(mine), head)
            for was, now in zip(before, together.heads[1 - head].get_weights(), strict=True):
                np.testing.assert_array_equal(now, was)
            step_alone(tf.constant(everyone), head)
    training.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    training.assert_bit_identical_on_all_ranks(together)


def test_heads_that_differ_by_rank_and_step() -> None:
    """In eager execution the ranks agree in each step on which gradients there are."""
    mine, everyone = share()
    together, alone = two_heads(), two_heads()
    sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    sgd.build(together.trainable_variables)
    own = keras.optimizers.SGD(0.1, momentum=0.9)
    own.build(alone.trainable_variables)
    step = make_step(together, sgd, lambda tape: tape, compiled=False)
    for number in range(4):
        heads = [(number + rank) % 2 if number < 3 else 1 for rank in range(SIZE)]
        step(tf.constant(mine), heads[RANK])
        with tf.GradientTape() as tape:
            losses = [
                tf.reduce_mean((alone(everyone[r * ROWS : (r + 1) * ROWS], head=h) - 1.0) ** 2)
                for r, h in enumerate(heads)
            ]
            loss = tf.add_n(losses) / SIZE
        with hvd.local_fit():
            own.apply_gradients(
                zip(
                    tape.gradient(loss, alone.trainable_variables),
                    alone.trainable_variables,
                    strict=True,
                )
            )
    training.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    training.assert_bit_identical_on_all_ranks(together)


class WithTape(training.OwnStep):
    """Its training step exchanges the gradients of all layers but the last two."""

    def tape(self, tape):
        return hvd.PartialDistributedGradientTape(tape, local_layers=self.layers[-2:])


@pytest.mark.parametrize("by", ["optimizer", "tape"])
def test_local_layers_keep_their_values_and_their_momentum(by: str, warned) -> None:
    mine, _ = share()
    shared, own = keras.layers.Dense(3), keras.layers.Dense(1, name=f"own_{RANK}_of_this_rank")
    norm = keras.layers.BatchNormalization()
    kind = keras.Sequential if by == "optimizer" else WithTape
    model = kind([keras.Input((5,)), shared, norm, own])
    local = [*own.variables, *norm.variables]
    training.set_weights(model, seed=RANK)
    optimizer = keras.optimizers.SGD(0.0, momentum=0.9)  # nothing moves but the buffers
    if by == "optimizer":
        optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=[own, norm])
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables:
        if "momentum" in variable.name:
            variable.assign(tf.fill(variable.shape, 1.0 + RANK))
    values = {v.path: np.array(v) for v in [*model.variables, *optimizer.variables]}
    begin = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: after.update(
            {v.path: np.array(v) for v in [*model.variables, *optimizer.variables]}
        )
    )
    after: dict[str, np.ndarray] = {}
    model.compile(optimizer=optimizer, loss="mse")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local if by == "tape" else None)
    model.fit(mine, mine[:, :1], batch_size=4, verbose=0, callbacks=[broadcast, begin])
    assert warned == []  # although the ranks' values differ
    for variable in local:
        np.testing.assert_array_equal(after[variable.path], values[variable.path])
    for variable in optimizer.variables:
        if "momentum" not in variable.name:
            continue
        is_local = any(v.path.replace("/", "_") in variable.name for v in local)
        assert (after[variable.path] == (1.0 + RANK if is_local else 1.0)).all(), variable.path
    kernels = hvd.allgather(after[shared.kernel.path][np.newaxis]).numpy()
    assert (kernels == kernels[0]).all()
    means = hvd.allgather(np.array(norm.moving_mean)[np.newaxis]).numpy()
    assert not (means == means[0]).all()  # not averaged at the end of the epoch


class OwnApply(keras.optimizers.SGD):
    """Overrides the public method without Keras's internal steps."""

    def apply(self, grads, trainable_variables=None):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)


class OwnBackend(keras.optimizers.SGD):
    def _backend_apply_gradients(self, grads, trainable_variables):
        self._backend_update_step(grads, trainable_variables, self.learning_rate)


class NeverApplies(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        for gradient, variable in grads_and_vars:
            variable.assign_sub(0.1 * gradient)


def one_step(optimizer, **fit):
    mine, _ = share()
    model = training.dense_model()
    training.set_weights(model, seed=0)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(mine, mine.sum(1, keepdims=True), batch_size=4, verbose=0, **fit)
    return model


@pytest.mark.parametrize("kind", [OwnApply, OwnBackend])
def test_optimizers_that_replace_what_keras_does(kind) -> None:
    training.assert_bit_identical_on_all_ranks(one_step(hvd.DistributedOptimizer(kind(0.1))))


def test_a_step_without_exchange_raises() -> None:
    with pytest.raises(RuntimeError, match="not exchanged, because its apply_gradients does not"):
        one_step(hvd.DistributedOptimizer(NeverApplies(0.1)))

    class Accumulates(OwnBackend):
        pass

    optimizer = Accumulates(0.1, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="not exchanged, because it never calls _clip_gradients"):
        one_step(hvd.DistributedOptimizer(optimizer))


def test_two_threads_do_not_train_at_once() -> None:
    told: list[bool] = []

    def fit() -> None:
        with pytest.raises(RuntimeError, match="another thread trains a model"):
            one_step(hvd.DistributedOptimizer("sgd"))
        told.append(True)

    def in_a_thread(*_) -> None:
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join()

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=in_a_thread)
    one_step(hvd.DistributedOptimizer("sgd"), callbacks=[callback])
    assert told


@pytest.mark.parametrize(
    "alone", ["local_fit", "loop in local_fit", "in another fit", "a set of one rank"]
)
def test_batch_normalisation_of_a_rank_that_trains_alone(alone: str) -> None:
    """Even if it is synchronized, which it is on all ranks otherwise."""
    x = np.arange(4.0)[:, None] + 100 * RANK
    layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
    model = keras.Sequential([keras.Input((1,)), layer])
    if alone == "a set of one rank":
        sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
        model.compile(hvd.DistributedOptimizer("sgd", process_set=sets[RANK]), "mse")
        model.fit(x, x, verbose=0)
    elif alone == "in another fit":

        def on_epoch_end(*_) -> None:
            with hvd.local_fit():
                layer(x, training=True)

        callback = keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
        one_step(hvd.DistributedOptimizer("sgd"), callbacks=[callback])
    else:
        model.compile("sgd", "mse")
        with hvd.local_fit():
            model.fit(x, x, verbose=0) if alone == "local_fit" else layer(x, training=True)
    np.testing.assert_allclose(layer.moving_mean, [1.5 + 100 * RANK], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, [1.25], rtol=1e-4)


def test_batch_normalisation_where_a_rank_has_no_rows() -> None:
    x = np.arange(3.0, dtype="float32")[: 3 * (RANK == 0), None]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    outputs = layer(x, training=True)
    assert np.isfinite(outputs).all()
    np.testing.assert_allclose(layer.moving_variance, [2 / 3], rtol=1e-4)


@pytest.mark.ranks(3)
def test_process_sets_train_and_write_by_themselves(directory) -> None:
    """All ranks but the first train together; meanwhile the first one trains alone."""
    together = hvd.add_process_set(range(1, SIZE))
    keras.utils.set_random_seed(RANK)
    mine, _ = share()
    y = mine.sum(1, keepdims=True)
    if RANK == 0:
        model = training.dense_model()
        model.compile(optimizer="sgd", loss="mse")
        path = directory / "alone.keras"
        with hvd.local_fit():
            model.fit(mine, y, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(path)])
        assert path.exists()
    else:
        norm = keras.layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([keras.layers.Dense(4), norm, keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), process_set=together)
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        path = directory / "together.keras"
        history = model.fit(
            mine,
            y,
            batch_size=4,
            epochs=3,
            verbose=0,
            validation_data=(mine, y),
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(1),
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=1),
                keras.callbacks.EarlyStopping(patience=5),
                keras.callbacks.ReduceLROnPlateau(patience=5),
                keras.callbacks.TerminateOnNaN(),
                keras.callbacks.ModelCheckpoint(path),
                keras.callbacks.CSVLogger(directory / f"{RANK}.csv"),
                hvd.callbacks.ModelCheckpoint(directory / "ours.keras"),
                hvd.callbacks.Checkpoint(directory / "state", process_set=together),
                hvd.callbacks.ProgressLogger(),
            ],
        )
        saved = keras.models.load_model(path)  # complete, although rank 1 has written it
        np.testing.assert_array_equal(training.flat(saved), training.flat(model))
        weights = training.flat(model)[np.newaxis]
        everyone = hvd.allgather(weights, process_set=together).numpy()
        assert (everyone == everyone[0]).all()
        losses = hvd.allgather(np.array([history.history["loss"]]), process_set=together).numpy()
        assert (losses == losses[0]).all()
    hvd.barrier()
    assert [p.name for p in sorted(directory.glob("*.csv"))] == ["1.csv"]


class Reads(keras.callbacks.Callback):
    """Reads what another callback has just written."""

    def __init__(self, path) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None) -> None:
        saved = keras.models.load_model(self.path)
        np.testing.assert_array_equal(training.flat(saved), training.flat(self.model))


@pytest.mark.parametrize("on_all_ranks", [True, False])
def test_files_are_there_when_fit_returns(directory, on_all_ranks) -> None:
    """Includes the case that only rank 0 has the callback, as in Horovod's examples."""
    path = directory / "model.keras"
    saver = keras.callbacks.ModelCheckpoint(path)
    saver._save_model = slowly(saver._save_model)
    callbacks = [saver, Reads(path)] if on_all_ranks else [saver] if RANK == 0 else []
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model = one_step(optimizer, epochs=3, callbacks=callbacks)
    saved = keras.models.load_model(path)
    np.testing.assert_array_equal(training.flat(saved), training.flat(model))


def slowly(save):
    def save_later(*args, **kwargs):
        time.sleep(0.3)
        return save(*args, **kwargs)

    return save_later


@pytest.mark.ranks(3)
def test_paths_may_lack_the_name_of_the_model() -> None:
    """As on the rank that has loaded the model; but two names are two models."""
    everyone = hvd.global_process_set
    path = "dense/kernel" if RANK == 0 else "model/dense/kernel"
    mine = specs.VariableSpec(path, (2, 3), "float32")
    (agreed,) = specs.check_specs("one model", [mine], everyone)
    assert agreed.path == "model/dense/kernel"
    for short in range(SIZE):  # the rank with the short path
        part = "partb/" if (short + 1) % SIZE == RANK else "parta/"
        path = ("" if short == RANK else part) + "dense/kernel"
        mine = specs.VariableSpec(path, (2, 3), "float32")
        with pytest.raises(ValueError, match="parta/dense/kernel"):
            specs.check_specs(f"two models {short}", [mine], everyone)
