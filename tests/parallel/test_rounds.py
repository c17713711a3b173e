"""sync_every: each rank trains alone between syncs, after which all have the same weights."""

import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree, log, process_sets
from tests.harness import training
from tests.parallel.test_training import EVERY, OPTIONS, RATES, SPECIAL

RANK, SIZE = hvd.rank(), hvd.size()
EPOCHS, STEPS, BATCH = 2, 7, 4
UNSUITABLE = {"Ftrl", "ScheduleFreeAdamW"}
optimizers, layers = keras.optimizers, keras.layers
two = pytest.mark.skipif(SIZE > 2, reason="more ranks change nothing")


def nesterov() -> optimizers.Optimizer:
    return optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def build(make: Callable[[], Any], more: tuple[Any, ...] = (), **compiled: Any) -> keras.Model:
    """Weights differ by rank before the broadcast.

    Eager by default, because a few steps take less time than tracing.
    """
    hidden = [layers.Dense(6, activation="tanh"), layers.BatchNormalization(), *more]
    model = keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(1)])
    training.set_weights(model, seed=RANK)
    model.compile(make(), loss="mse", **(compiled or {"run_eagerly": True}))
    return model


def rows(rank: int = RANK, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Those of each rank are of another function."""
    random = np.random.default_rng(rank)
    x = random.normal(size=(steps * BATCH, 5)).astype("float32")
    return x, (x.sum(1, keepdims=True) + rank).astype("float32")


def fit(model: keras.Model, *more: Any, epochs: int = EPOCHS, **how: Any) -> dict[str, Any]:
    return training.fit(model, *more, data=rows(), epochs=epochs, **how)


def state(model: keras.Model) -> list[Any]:
    """What a sync averages besides the trainable weights."""
    own = model.optimizer
    own = getattr(own, "inner_optimizer", own)
    averages = getattr(own, "_model_variables_moving_average", [])
    return [*model.non_trainable_variables, *averages]


def by_hand(model: keras.Model, every: int, outer: Any, everyone: Any = hvd.global_process_set):
    """The same training as a loop. The ranks' steps are local, or those of inner sets."""
    hvd.broadcast_variables(model.variables, everyone.ranks[0], everyone)
    outer = outer() if outer else optimizers.SGD(1.0)
    common = [keras.Variable(v) for v in model.trainable_variables]
    with hvd.local_fit():
        outer.build(common)
        for _ in range(EPOCHS):
            for step in range(STEPS):
                part = slice(step * BATCH, (step + 1) * BATCH)
                model.train_on_batch(*(array[part] for array in rows()))
                if (step + 1) % every and step + 1 < STEPS:
                    continue
                moved = [c - v for c, v in zip(common, model.trainable_variables, strict=True)]
                outer.apply([hvd.allreduce(m, process_set=everyone) for m in moved])
                for mine, theirs in zip(model.trainable_variables, common, strict=True):
                    mine.assign(theirs)
                for v in state(model):
                    if v.dtype.startswith("float"):
                        v.assign(hvd.allreduce(v.value, process_set=everyone))
        model.optimizer.finalize_variable_values(model.trainable_variables)
    return training.flat(model)


def assert_as_by_hand(make: Callable[[], Any], every: int, outer: Any, **how: Any) -> keras.Model:
    compiled, loop = how.pop("compiled", {"run_eagerly": True}), how.pop("loop", by_hand)
    options = {"sync_every": every, "outer_optimizer": outer and outer(), **how}
    together = build(lambda: hvd.DistributedOptimizer(make(), **options), **compiled)
    start = training.flat(together)
    fit(together)
    training.assert_bit_identical_on_all_ranks(together)
    passes = make().gradient_accumulation_steps or 1
    alone = loop(build(make), every * passes, outer)
    assert np.abs(alone - start).max() > 0.01, "training did nothing"
    np.testing.assert_allclose(training.flat(together), alone, rtol=2e-4, atol=2e-5)
    return together


def made(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(optimizers, name)(RATES.get(name, 0.01), **options)


@pytest.mark.parametrize("fragments", [1, 3])
def test_constraints_hold_after_a_sync(fragments: int) -> None:
    model = build(lambda: None)
    model.layers[0].kernel.constraint = keras.constraints.UnitNorm()
    how = {"sync_every": 3, "outer_optimizer": nesterov(), "fragments": fragments}
    model.compile(hvd.DistributedOptimizer(optimizers.SGD(0.05), **how), loss="mse")
    fit(model)
    norms = np.linalg.norm(model.layers[0].get_weights()[0], axis=0)
    np.testing.assert_allclose(norms, np.ones_like(norms), rtol=1e-5)
    training.assert_bit_identical_on_all_ranks(model)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("outer", [None, lambda: optimizers.SGD(1.0)])
def test_rounds_of_one_update_are_the_average_of_gradients(outer) -> None:
    def trained(**options: Any) -> np.ndarray:
        model = training.dense_model()
        training.set_weights(model, seed=RANK)
        model.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1), **options), loss="mse")
        fit(model)
        training.assert_bit_identical_on_all_ranks(model)
        return training.flat(model)

    rounds = trained(sync_every=1, outer_optimizer=outer and outer(), fragments=1)
    np.testing.assert_allclose(rounds, trained(), rtol=1e-5, atol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", [name for name in EVERY if name not in UNSUITABLE])
def test_every_optimizer(optimizer: str) -> None:
    assert_as_by_hand(made(optimizer), 3, nesterov)


@pytest.mark.cases(1)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option: str) -> None:
    assert_as_by_hand(made("Adam", **OPTIONS[option]), 2, None)


@pytest.mark.ranks(2, 3)
@pytest.mark.cases(1)
@pytest.mark.parametrize("outer", [None, nesterov])
def test_graphs_xla_and_several_steps_at_once(outer) -> None:
    for compiled in ({"jit_compile": True}, {"jit_compile": False, "steps_per_execution": 2}):
        assert_as_by_hand(made("Adam"), 4, outer, compiled=compiled)


@two
def test_half_precision_and_a_rank_that_skips_updates() -> None:
    """The ranks' counters and loss scales differ, and their weights are common all the same."""

    def make() -> Any:
        scaled = optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**10)
        return hvd.DistributedOptimizer(scaled, sync_every=3, outer_optimizer=nesterov())

    with_half = keras.mixed_precision.DTypePolicy("mixed_float16")
    model = build(make, (layers.Dense(4, dtype=with_half),))
    before = training.flat(model)
    x, y = rows()
    training.fit(model, data=(x, y * 10.0 ** (4 * RANK)), epochs=EPOCHS)
    training.assert_bit_identical_on_all_ranks(model)
    assert np.isfinite(training.flat(model)).all()
    assert (training.flat(model) != before).any()
    made = hvd.allgather_object(int(model.optimizer.inner_optimizer.iterations))
    assert made[0] > made[1], "both skipped the same updates"


class Record(keras.callbacks.Callback):
    """The bytes that each step sends, and whether all ranks have equal weights after it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.equal: list[bool] = []

    def count(self) -> int:
        hvd.barrier()  # on the queue behind what is in flight
        kinds = hvd.stats()["collectives"]
        return sum(kind["bytes"] for name, kind in kinds.items() if name != "barrier")

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self.before = self.count()

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.sent.append(self.count() - self.before)
        theirs = hvd.allgather_object(training.flat(self.model).tobytes())
        self.equal.append(len({*theirs}) == 1)


@pytest.mark.ranks(2, 3)
def test_weights_are_common_after_each_sync_and_nothing_travels_in_between() -> None:
    record = Record()
    model = build(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.05), sync_every=3))
    fit(model, record, epochs=1)
    assert np.flatnonzero(record.equal).tolist() == [2, 5, 6]
    steps = np.array(record.sent)
    weights = sum(w.size * 4 for w in model.get_weights())
    assert [bool(sent) for sent in steps] == [False, False, True, False, False, True, True]
    assert all(weights <= sent < weights + 4000 for sent in steps[[2, 5, 6]]), steps


@two
def test_differences_are_rounded_by_compression() -> None:
    def trained(**how: Any) -> np.ndarray:
        model = build(lambda: hvd.DistributedOptimizer(made("SGD")(), sync_every=3, **how))
        fit(model)
        training.assert_bit_identical_on_all_ranks(model)
        return training.flat(model)

    error = np.abs(trained(compression=hvd.Compression.bf16) - trained())
    assert 1e-6 < error.max() < 0.02


@pytest.mark.parametrize("steps", [6, 7])
def test_an_epoch_of_unknown_length_that_ends_with_a_round_ends_it_once(steps: int) -> None:
    def trained(known: bool) -> np.ndarray:
        options = {"sync_every": 3, "outer_optimizer": nesterov()}
        model = build(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.05), **options))
        data = tf.data.Dataset.from_tensor_slices(rows(steps=steps)).batch(BATCH)
        data = data if known else data.filter(lambda x, y: True)
        training.fit(model, data=data, epochs=2)
        training.assert_bit_identical_on_all_ranks(model)
        return training.flat(model)

    np.testing.assert_array_equal(trained(known=False), trained(known=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(
    ("after", "save_freq", "passes"), [(4, 2, 1), (9, 4, 1), (8, "epoch", 1), (12, 1, 2)]
)
def test_a_restart_within_a_round_goes_on_bit_for_bit(
    directory, after, save_freq, passes, fragments
) -> None:
    def make() -> Any:
        accumulates = passes if passes > 1 else None
        inner = optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=accumulates)
        options = {"sync_every": 3, "outer_optimizer": nesterov()}
        if fragments > 1:
            options |= {"fragments": fragments, "compression": hvd.Compression.int8}
        return hvd.DistributedOptimizer(inner, **options)

    def model() -> keras.Model:
        return build(make, (layers.Dropout(0.3, seed=RANK),))

    def saved() -> Any:
        return hvd.callbacks.Checkpoint(directory / "saved", save_freq=save_freq)

    undisturbed = model()
    fit(undisturbed, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(model(), saved(), training.Crash(after + 1), epochs=3)
    again = model()
    fit(again, saved(), epochs=3)
    training.assert_bit_identical_on_all_ranks(again)
    mine = [*again.variables, *again.optimizer.variables]
    training.assert_same(mine, [*undisturbed.variables, *undisturbed.optimizer.variables])


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("left", "fragments", "inner"),
    [((0, 1), 1, ""), ((0, 1), 3, ""), ((0,), 3, ""), ((0, 1), 1, "now"), ((0, 1), 3, "then")],
)
def test_fewer_ranks_go_on(directory, left, fragments, inner) -> None:
    """They may be one set, which has no rounds, or may have been."""
    some = hvd.add_process_set(left)

    def trained(ranks: Any, **how: Any) -> keras.Model:
        options = {"sync_every": 3, "outer_optimizer": nesterov(), "process_set": ranks}
        options |= {"fragments": fragments}
        if inner == ("now" if ranks is some else "then"):
            options["inner_process_set"] = ranks
        model = build(lambda: hvd.DistributedOptimizer(optimizers.Adam(0.01), **options))
        saved = hvd.callbacks.Checkpoint(directory / "saved", save_freq=2, process_set=ranks)
        fit(model, saved, *how.pop("more", ()), **how)
        return model

    with pytest.raises(KeyboardInterrupt):
        trained(hvd.global_process_set, more=[training.Crash(10)], epochs=3)
    if some.included():
        values = training.flat(trained(some, epochs=3)).tobytes()
        assert len({*hvd.allgather_object(values, process_set=some)}) == 1


@pytest.mark.ranks(3)
def test_gradients_are_averaged_within_hosts_in_each_step(monkeypatch) -> None:
    """Two ranks on one host, and one on another."""
    name = types.SimpleNamespace(nodename=f"host {RANK // 2}")
    monkeypatch.setattr(process_sets.os, "uname", lambda: name)
    options = {"sync_every": 3, "inner_process_set": "host"}
    together = build(lambda: hvd.DistributedOptimizer(optimizers.Adam(0.01), **options))
    fit(together)
    (pair,) = process_sets.added()[1:]
    assert pair.ranks == [0, 1]
    how = {"process_set": pair} if pair.included() else None
    own = optimizers.Adam(0.01)
    of_host = build(lambda: hvd.DistributedOptimizer(own, **how) if how else own)
    expected = by_hand(of_host, 3, None)
    np.testing.assert_allclose(training.flat(together), expected, rtol=2e-4, atol=2e-5)


def assert_as_by_hand_within_sets(outer: Any, loop: Any = by_hand, **how: Any) -> None:
    """Two ranks are a set, and the third one alone."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2])]
    mine = next(one for one in sets if one.included())
    options = {"outer_optimizer": outer and outer(), "inner_process_set": mine, **how}
    together = build(lambda: hvd.DistributedOptimizer(optimizers.Adam(0.01), **options))
    fit(together)
    training.assert_bit_identical_on_all_ranks(together)
    of_sets = build(lambda: hvd.DistributedOptimizer(optimizers.Adam(0.01), process_set=mine))
    expected = loop(of_sets, how["sync_every"], outer)
    np.testing.assert_allclose(training.flat(together), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("outer", [None, nesterov])
def test_gradients_are_averaged_within_sets_in_each_step(outer) -> None:
    assert_as_by_hand_within_sets(outer, sync_every=3)
    first = hvd.add_process_set([0])
    other = first if RANK == 0 else hvd.global_process_set
    with pytest.raises(ValueError, match="each rank that trains the model must pass"):
        hvd.DistributedOptimizer(optimizers.SGD(0.1), sync_every=2, inner_process_set=other)


@pytest.mark.ranks(3)
def test_some_of_the_ranks_train_a_model() -> None:
    ends = hvd.add_process_set([0, 2])
    if ends.included():
        options = {"sync_every": 3, "outer_optimizer": nesterov(), "process_set": ends}
        model = build(lambda: hvd.DistributedOptimizer(optimizers.Adam(0.01), **options))
        fit(model)
        expected = by_hand(build(made("Adam")), 3, nesterov, ends)
        np.testing.assert_allclose(training.flat(model), expected, rtol=2e-4, atol=2e-5)


def test_validation_metrics_and_saved_models_are_those_of_the_common_weights(directory) -> None:
    average = hvd.callbacks.MetricAverageCallback()
    saved = keras.callbacks.ModelCheckpoint(directory / "{epoch}.keras", monitor="val_loss")
    model = build(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.05), sync_every=4))
    stop = keras.callbacks.EarlyStopping("val_loss", patience=5)
    logs = fit(model, average, saved, stop, validation_data=rows(RANK + 10))
    agree.gather_json("saved", None)
    assert len({*hvd.allgather_object(str(logs))}) == 1
    loaded = keras.models.load_model(directory / f"{EPOCHS}.keras")
    np.testing.assert_array_equal(training.flat(loaded), training.flat(model))
    of_ranks = [loaded.evaluate(*rows(rank + 10), verbose=0) for rank in range(SIZE)]
    np.testing.assert_allclose(logs["val_loss"][-1], np.mean(of_ranks), rtol=1e-5)


def test_a_layer_of_one_rank_keeps_its_weights() -> None:
    model = build(lambda: None)
    optimizer = hvd.PartialDistributedOptimizer(
        optimizers.SGD(0.05), sync_every=3, local_layers=model.layers[-1]
    )
    model.compile(optimizer, loss="mse")
    fit(model)
    values = [[w.tobytes() for w in layer.get_weights()] for layer in model.layers]
    of_all = hvd.allgather_object(values)
    assert [mine == other for mine, other in zip(*of_all[:2], strict=True)] == [True, True, False]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("fragments", [1, 3])
def test_a_rank_that_stops_lets_the_others_stop(fragments) -> None:
    class Stop(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None) -> None:
            self.seen += 1
            if RANK == 1 and self.seen == 5:
                self.model.stop_training = True

    stop = Stop()
    options = {"sync_every": 3 * fragments, "fragments": fragments}
    model = build(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.05), **options))
    fit(model, stop, keras.callbacks.TerminateOnNaN(), epochs=3)
    assert stop.seen == (5 if RANK == 1 else 6)
    training.assert_bit_identical_on_all_ranks(model)


@pytest.mark.ranks(2, 3)
def test_ranks_with_different_numbers_of_batches_get_an_error() -> None:
    def batches():
        x, y = rows()
        for step in range(STEPS - RANK):
            yield x[step * BATCH : (step + 1) * BATCH], y[step * BATCH : (step + 1) * BATCH]

    spec = tf.TensorSpec((BATCH, 5)), tf.TensorSpec((BATCH, 1))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model = build(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.05), sync_every=3))
    with pytest.raises(ValueError, match=r"different numbers of batches of an epoch: rank 0: \d; "):
        training.fit(model, data=data, epochs=2)


@two
def test_batches_of_different_sizes_get_a_warning(warned) -> None:
    model = build(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.05), sync_every=2))
    training.fit(model, data=hvd.data.shard(rows(rank=5), batch_size=[2, 6]))
    assert ["sync_every averages the weights of all ranks alike" in text for text in warned] == (
        [True] if RANK == 0 else []
    )


def refused(match: str, make: Callable[[], Any], error: Any = ValueError) -> None:
    with pytest.raises(error, match=match):
        make()


@two
def test_arguments_that_exclude_each_other(monkeypatch) -> None:
    def distribute(optimizer: Any = None, **options: Any) -> Any:
        optimizer = optimizer or optimizers.SGD(0.1)
        return hvd.DistributedOptimizer(optimizer, **{"sync_every": 3, **options})

    refused("got None, expected", lambda: distribute(sync_every=None, outer_optimizer=nesterov()))
    refused("got 0, expected", lambda: distribute(sync_every=0))
    for name in UNSUITABLE & {*EVERY}:
        refused(f"sync_every: {name} computes", lambda name=name: distribute(made(name)()))
    refused("Use hvd.Average", lambda: distribute(op=hvd.Sum))
    refused("shard_state=True", lambda: distribute(shard_state=True))
    refused("outer_optimizer is 'sgd'", lambda: distribute(outer_optimizer="sgd"))
    used = nesterov()
    used.build([keras.Variable(1.0)])
    refused("outer_optimizer is in use", lambda: distribute(outer_optimizer=used))
    twice = nesterov()
    distribute(outer_optimizer=twice)
    refused("outer_optimizer is in use", lambda: distribute(outer_optimizer=twice))
    free = optimizers.ScheduleFreeAdamW()
    refused("slots that begin as", lambda: distribute(outer_optimizer=free))
    refused("fragments=2, expected a number that divides 3", lambda: distribute(fragments=2))
    refused("fragments=0, expected", lambda: distribute(fragments=0))
    refused("int8 needs fragments", lambda: distribute(compression=hvd.Compression.int8))
    outer = optimizers.SGD(0.7, gradient_accumulation_steps=2)
    refused("must not have gradient_accum", lambda: distribute(fragments=3, outer_optimizer=outer))
    refused("inner_process_set is 'rack'", lambda: distribute(inner_process_set="rack"))
    told: list[str] = []
    monkeypatch.setattr(log, "warn_once", told.append)
    everywhere = distribute(inner_process_set="host", outer_optimizer=nesterov())  # there is one
    assert ["outer_optimizer does nothing" in text for text in told] == [True] * (hvd.rank() == 0)
    everywhere.apply([tf.ones(2)], [keras.Variable([0.0, 0.0])])
    loop = distribute()
    refused("needs the fit of a model", lambda: loop.apply([tf.ones(2)]), RuntimeError)


@two
def test_models_and_callbacks_that_exclude_it() -> None:
    def trained(*callbacks: Any, more: tuple[Any, ...] = (), every: int = 3, **compiled: Any):
        make = lambda: hvd.DistributedOptimizer(optimizers.SGD(0.05), sync_every=every)  # noqa: E731
        fit(build(make, more, **compiled), *callbacks)

    synchronized = layers.BatchNormalization(synchronized=True)
    refused("has synchronized=True", lambda: trained(more=(synchronized,)))
    refused("multiple of steps_per_execution=2", lambda: trained(steps_per_execution=2))
    within = keras.callbacks.ModelCheckpoint("x.keras", save_freq=3)
    refused("sync_every: the ranks have common", lambda: trained(within))
    refused("batches of a round", lambda: trained(every=3 + RANK))
    table = [layers.Flatten(), hvd.layers.Embedding(8, 2, shard="rows"), layers.Flatten()]
    cast = layers.Lambda(lambda x: tf.cast(x > 0, "int32"))
    refused("is divided between the ranks", lambda: trained(more=(cast, *table)))

    class Taped(training.OwnStep):
        tape = staticmethod(hvd.DistributedGradientTape)

    model = Taped([keras.Input((5,)), layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1), sync_every=2), loss="mse")
    refused("hvd.DistributedGradientTape in each", lambda: fit(model))


@two
@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", ["multi", "schedule", "a user's own", "loss_scale"])
def test_other_optimizers(optimizer: str) -> None:
    assert_as_by_hand(SPECIAL[optimizer], 3, nesterov)
