"""sync_every with fragments: parts of the weights are synced in turn, while training goes on."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from tests.harness import training
from tests.parallel.test_rounds import (
    BATCH,
    EPOCHS,
    STEPS,
    Record,
    assert_as_by_hand,
    assert_as_by_hand_within_sets,
    build,
    fit,
    made,
    nesterov,
    rows,
    state,
    two,
)
from tests.parallel.test_training import OPTIONS

RANK, SIZE = hvd.rank(), hvd.size()
optimizers, layers = keras.optimizers, keras.layers


def values_of(weights: list[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(weight).ravel() for weight in weights])


def assign(weights: list[Any], values: np.ndarray) -> None:
    ends = np.cumsum([np.asarray(weight).size for weight in weights])
    for weight, part in zip(weights, np.split(values, ends[:-1]), strict=True):
        weight.assign(part.reshape(weight.shape))


def by_hand_in_halves(model: keras.Model, every: int, outer: Any) -> np.ndarray:
    """The same training as a loop, of two fragments of equal numbers of values."""
    hvd.broadcast_variables(model.variables, 0)
    weights = model.trainable_variables
    begun = values_of(weights)
    parts = slice(0, len(begun) // 2), slice(len(begun) // 2, None)
    of_parts = [outer() if outer else optimizers.SGD(1.0) for _ in parts]
    common = [keras.Variable(begun[part]) for part in parts]

    def difference(i: int) -> np.ndarray:
        return np.asarray(common[i]) - values_of(weights)[parts[i]]

    def advance(i: int, moved: np.ndarray) -> None:
        of_parts[i].apply([hvd.allreduce(tf.constant(moved))], [common[i]])

    with hvd.local_fit():
        for own, part in zip(of_parts, common, strict=True):
            own.build([part])
        for _ in range(EPOCHS):
            flight: Any = None
            for step in range(1, STEPS + 1):
                rows_of_step = slice((step - 1) * BATCH, step * BATCH)
                model.train_on_batch(*(array[rows_of_step] for array in rows()))
                if step % (every // 2) and step < STEPS:
                    continue
                if flight is not None:
                    number, moved = flight
                    old = np.array(common[number])
                    advance(number, moved)
                    values = values_of(weights)
                    values[parts[number]] += np.asarray(common[number]) - old + moved
                    assign(weights, values)
                number = 0 if flight is None else 1 - flight[0]
                flight = number, difference(number)
            for i, moved in enumerate([difference(i) for i in range(2)]):
                advance(i, moved)
            assign(weights, values_of(common))
            for v in state(model):
                if v.dtype.startswith("float"):
                    v.assign(hvd.allreduce(v.value))
        model.optimizer.finalize_variable_values(weights)
    return training.flat(model)


@pytest.mark.ranks(2, 3)
@pytest.mark.cases(1)
@pytest.mark.parametrize("outer", [None, nesterov])
def test_fragments_travel_during_the_updates_that_follow(outer) -> None:
    for compiled in ({"run_eagerly": True}, {"steps_per_execution": 2}):
        assert_as_by_hand(
            made("Adam"), 4, outer, fragments=2, loop=by_hand_in_halves, compiled=compiled
        )


@two
@pytest.mark.cases(1)
@pytest.mark.parametrize("option", OPTIONS)
def test_fragments_with_every_option(option: str) -> None:
    assert_as_by_hand(
        made("Adam", **OPTIONS[option]), 4, nesterov, fragments=2, loop=by_hand_in_halves
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.cases(2)
@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
def test_fragments_divide_the_bytes_of_a_sync(compression: str) -> None:
    def trained(fragments: int, more: Any = (), **how: Any) -> np.ndarray:
        # Most values are in one variable, of which each fragment has a part.
        large = layers.Dense(128, "tanh")
        model = keras.Sequential([keras.Input((5,)), layers.Dense(128), large, layers.Dense(1)])
        training.set_weights(model, seed=0)
        options = {"sync_every": 4, "fragments": fragments, **how}
        model.compile(hvd.DistributedOptimizer(optimizers.SGD(1e-3), **options), loss="mse")
        fit(model, *more, epochs=1)
        training.assert_bit_identical_on_all_ranks(model)
        return training.flat(model)

    record = Record()
    how = {"compression": getattr(hvd.Compression, compression)} if compression != "none" else {}
    weights = trained(4, [record], **how)
    assert record.equal == [False] * 6 + [True]
    wide = 4 * weights.size
    fragment = wide / 4 / {"none": 1, "bf16": 2, "int8": 4}[compression]
    assert all(0.8 * fragment < sent < 1.2 * fragment + 500 for sent in record.sent[:6]), (
        record.sent
    )
    exact = trained(4)
    assert np.abs(weights - exact).max() < 1e-3
    assert (np.abs(weights - exact).max() > 0) == (compression != "none")


@two
def test_what_rounding_loses_is_sent_later(monkeypatch) -> None:
    """The mean of the ranks' weights moves as their own updates do."""
    model = build(
        lambda: hvd.DistributedOptimizer(
            optimizers.SGD(0.05), sync_every=4, fragments=2, compression=hvd.Compression.int8
        )
    )
    rounds = model.optimizer._hvd_reducer.rounds
    lost: list[float] = []
    land = rounds._land

    def watched() -> None:
        part = rounds._parts[int(rounds._flight)]
        before = [hvd.allreduce(piece.value) for piece in rounds.pieces[part]]
        land()
        after = [hvd.allreduce(piece.value) for piece in rounds.pieces[part]]
        lost.extend(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True))

    monkeypatch.setattr(rounds, "_land", watched)
    fit(model)
    assert len(lost) > 4
    assert max(lost) < 1e-6, lost


@two
def test_what_is_no_number_reaches_all_ranks_in_int8() -> None:
    model = build(
        lambda: hvd.DistributedOptimizer(
            optimizers.SGD(0.05), sync_every=2, fragments=2, compression=hvd.Compression.int8
        )
    )
    x, y = rows()
    training.fit(model, data=(x, y * (np.nan if RANK else 1)))
    assert np.isnan(training.flat(model)).all()


def test_what_has_begun_lets_other_requests_pass() -> None:
    def begin() -> Any:
        mine = [np.full(1_000_000, 1.0 + RANK, "float32")]
        return agree.begin("allreduce", mine, name="begun", reduction="Sum")

    finish = begin() if RANK == 0 else None
    assert agree.gather_json("in between", RANK) == list(range(SIZE))
    (total,) = (finish or begin())()
    np.testing.assert_array_equal(total, np.full(1_000_000, sum(range(1, SIZE + 1)), "float32"))


@pytest.mark.slow  # sets without fragments, and fragments without sets, are not
@pytest.mark.ranks(3)
def test_gradients_are_averaged_within_sets_while_a_fragment_travels() -> None:
    how = {"sync_every": 4, "fragments": 2}
    assert_as_by_hand_within_sets(nesterov, by_hand_in_halves, **how)
