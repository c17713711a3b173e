"""An optimizer's state in shares: the weights of a training without, bit for bit."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import shards
from hvd_keras.runtime import settings
from tests.parallel.test_training import EVERY, OPTIONS, RATES
from tests.programs.own import Own

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(2, 3)
EVERYONE = hvd.global_process_set
two = pytest.mark.skipif(SIZE > 2, reason="more ranks change nothing")
optimizers = keras.optimizers
REFUSED = {"Adafactor": "rows and columns", "ScheduleFreeAdamW": "copies of the weights"}
SHAPES = [(3, 5), (5,), (2, 3, 4), (5, 2), (), (7,)]  # of which Muon treats some as matrices


def variables(shapes: Any = SHAPES, dtype: str = "float32") -> list[keras.Variable]:
    random = np.random.default_rng(5)
    return [
        keras.Variable(random.normal(size=shape), dtype=dtype, name=f"v{i}")
        for i, shape in enumerate(shapes)
    ]


def gradients(step: Any, trained: list[Any], rank: int = RANK) -> list[Any]:
    """Different on each rank and in each step.

    Without sums of several scalars, which TensorFlow may add in another order in another graph.
    """
    now = tf.cast(step, "float32")
    return [
        tf.cast(tf.sin(tf.cast(v, "float32") * 3 + now) * (i + 0.7 * rank + 0.1), v.dtype)
        for i, v in enumerate(trained)
    ]


def updated(
    make: Callable[[], Any],
    shard_state: bool,
    *,
    trained: list[Any] | None = None,
    of: Callable[..., list[Any]] = gradients,
    steps: int = 6,
    eagerly: bool = False,
    jit_compile: bool | None = None,
    **options: Any,
) -> tuple[list[np.ndarray], Any]:
    """The variables after some updates, and the optimizer."""
    trained = variables() if trained is None else trained
    optimizer = hvd.DistributedOptimizer(make(), shard_state=shard_state, **options)

    def step(number: Any) -> None:
        optimizer.apply(of(number, trained), trained)

    optimizer.build(trained)
    run = step if eagerly else tf.function(step, jit_compile=jit_compile)
    for number in range(steps):
        run(tf.constant(number))
    optimizer.finalize_variable_values(trained)
    return [np.asarray(v).copy() for v in trained], optimizer


def assert_bit_equal(make: Callable[[], Any], fresh: Any = None, **how: Any) -> Any:
    """Compares with a training without; returns the optimizer with a share of the state."""
    fresh = fresh or variables
    expected, _ = updated(make, False, trained=fresh(), **how)
    found, optimizer = updated(make, True, trained=fresh(), **how)
    changed = False
    for before, a, b in zip(fresh(), expected, found, strict=True):
        assert a.tobytes() == b.tobytes(), f"{before.path}: {np.abs(a - b).max()}"
        changed = changed or (a != np.asarray(before)).any()
    assert changed, "training did nothing"
    digest = b"".join(value.tobytes() for value in found)
    everyone = hvd.allgather_object(digest, process_set=how.get("process_set", EVERYONE))
    assert set(everyone) == {digest}, "the ranks differ"
    return optimizer


def made(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(optimizers, name)(RATES.get(name, 0.01), **options)


def check_cell(optimizer: str, option: str, eagerly: bool = False) -> None:
    make = made(optimizer, **OPTIONS[option])
    if optimizer in REFUSED:
        with pytest.raises(ValueError, match=f"not possible for {optimizer}.*{REFUSED[optimizer]}"):
            hvd.DistributedOptimizer(make(), shard_state=True)
        return
    # In graphs, TensorFlow moves factors such as the norm's, and so rounds elsewhere.
    result = assert_bit_equal(make, eagerly=eagerly or option == "global_clipnorm")
    if optimizer != "SGD":
        assert any(v.shape == (0,) for v in result.variables), "has all slots"


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("optimizer", EVERY)
def test_shares_of_every_optimizer_with_every_option(optimizer: str, option: str) -> None:
    check_cell(optimizer, option)


# Of the table above, which takes minutes: each optimizer and each option at least once, without
# the time that it takes to trace.
@pytest.mark.cases(1)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("number", range(len(EVERY)) if SIZE == 2 else (2, 3, 8))
def test_shares(number: int) -> None:
    check_cell(EVERY[number], list(OPTIONS)[number % len(OPTIONS)], eagerly=True)


@pytest.mark.cases(1)
@two
@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "gradient_predivide_factor": 3.0},
        {"op": hvd.Sum},
        {"backward_passes_per_step": 2},
        {"backward_passes_per_step": 3, "average_aggregated_gradients": True},
        {"sparse_as_dense": True},
    ],
)
def test_options_of_the_exchange(options: dict[str, Any]) -> None:
    traced = "average_aggregated_gradients" in options  # accumulation is another code there
    assert_bit_equal(made("Adam"), eagerly=not traced, **options)


@pytest.mark.parametrize("bytes_of_a_bucket", [16, 100])
def test_small_buckets_and_several_dtypes(bytes_of_a_bucket: int, monkeypatch) -> None:
    """Buckets end within variables, and before the first."""
    chosen = settings.Settings(bucket_bytes=bytes_of_a_bucket)
    monkeypatch.setattr(settings, "read", lambda: chosen)

    def fresh() -> list[Any]:
        return [*variables(), *variables([(4,), (3, 3)], "bfloat16"), *variables([(9,)], "float16")]

    assert_bit_equal(made("SGD", momentum=0.9), fresh, eagerly=bytes_of_a_bucket == 16)


@pytest.mark.ranks(2, 3, 4)
def test_one_variable_is_most_of_the_model() -> None:
    assert_bit_equal(made("Adam"), lambda: variables([(3,), (400,), (2, 2), ()]), eagerly=True)


def test_sparse_and_missing_gradients() -> None:
    def of(step: Any, trained: list[Any]) -> list[Any]:
        dense = gradients(step, trained)
        ids = tf.constant([1, RANK, 1])  # twice on one rank, and on several
        dense[0] = tf.IndexedSlices(dense[0][:3] * 0.5, ids, tf.constant([3, 5]))
        dense[3] = None  # on all ranks
        return dense

    for option, eagerly in (("plain", True), ("global_clipnorm", False)):
        assert_bit_equal(made("Adam", **OPTIONS[option]), of=of, eagerly=eagerly)


def test_a_gradient_that_one_rank_lacks() -> None:
    def of(step: Any, trained: list[Any]) -> list[Any]:
        found = gradients(step, trained)
        number = int(step) % len(trained)
        return [None if i == number and RANK == 0 else g for i, g in enumerate(found)]

    assert_bit_equal(made("Adam"), of=of, eagerly=True)


def test_one_rank_overflows() -> None:
    def of(step: Any, trained: list[Any]) -> list[Any]:
        found = gradients(step, trained)
        bad = tf.cast(tf.where((step == 2) & (RANK == 0), np.inf, 1.0), "float32")
        return [found[0] * bad, *found[1:]]

    def make() -> Any:
        return optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=8.0)

    optimizer = assert_bit_equal(make, of=of)
    assert float(optimizer.dynamic_scale) == 4.0, "the overflow was found"


@two
def test_a_users_own_optimizer_and_schedules() -> None:
    assert_bit_equal(lambda: Own(0.1), eagerly=True)
    schedule = optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    assert_bit_equal(lambda: optimizers.Adam(schedule), eagerly=True)


@two
def test_constraints_and_weights_without_decay() -> None:
    def fresh() -> list[Any]:
        found = variables()
        found[0].constraint = keras.constraints.MaxNorm(0.5)
        return found

    def make() -> Any:
        optimizer = optimizers.AdamW(0.01)
        optimizer.exclude_from_weight_decay(var_names=["v1"])
        return optimizer

    assert_bit_equal(make, fresh, eagerly=True)


def test_fewer_variables_than_ranks() -> None:
    assert_bit_equal(made("Nadam", global_clipnorm=0.1), lambda: variables([(3,)]), eagerly=True)


@two
def test_variables_of_one_rank() -> None:
    """They stay on each rank, with all their slots."""
    results = []
    for shard_state in (False, True):
        trained = variables()
        optimizer = hvd.DistributedOptimizer(made("Adam")(), shard_state=shard_state)
        optimizer.register_local_var(trained[0])
        optimizer.build(trained)
        for step in range(3):
            optimizer.apply(gradients(step, trained))
        results.append(np.concatenate([np.asarray(v).ravel() for v in trained]))
    np.testing.assert_array_equal(*results)
    with pytest.raises(ValueError, match=r"has an owner already \(shard_state=True\)"):
        optimizer.register_local_var(trained[1])


@pytest.mark.ranks(2, 3, 4)
def test_slots_are_about_an_nth() -> None:
    shapes = [(40, 30), (30,), (30, 50), (50,), (50, 7), (7,), (100,), (20, 20), (3, 3, 8, 8)]
    how = {"steps": 2, "eagerly": True}
    _, optimizer = updated(made("Adam"), True, trained=variables(shapes), **how)
    slots = optimizer.variables[2:]
    mine = sum(4 * int(np.prod(v.shape)) for v in slots)
    total = 2 * 4 * sum(int(np.prod(shape)) for shape in shapes)
    assert sum(hvd.allgather_object(mine)) == total
    assert mine <= total / SIZE + 2 * 4 * 1500
    _, whole = updated(made("Adam"), False, trained=variables(shapes), **how)
    for share, expected in zip(slots, whole.variables[2:], strict=True):
        np.testing.assert_array_equal(shards.whole(share), expected)


@two
def test_what_cannot_be() -> None:
    built = optimizers.Adam()
    built.build(variables())

    class Strange(optimizers.SGD):
        def build(self, trained: Any) -> None:
            super().build(trained)
            self.more = self.add_variable((3,), name="more")

    multi = optimizers.MultiOptimizer([(optimizers.Adam(), [])])
    cases = [
        (built, {}, "is built already, with all its slots"),
        (multi, {}, "no slots itself"),
        (optimizers.Adam(), {"op": hvd.Adasum}, "Adasum needs all gradients on all ranks"),
        (optimizers.Adam(), {"num_groups": 2}, "packs gradients by their owners"),
        (tf.compat.v1.train.AdamOptimizer(), {}, "needs an optimizer of Keras 3"),
    ]
    for optimizer, options, text in cases:
        with pytest.raises(ValueError, match=f"shard_state=True.*{text}"):
            hvd.DistributedOptimizer(optimizer, shard_state=True, **options)
    strange = hvd.DistributedOptimizer(Strange(0.1), shard_state=True)
    with pytest.raises(ValueError, match=r"shape \[3\] that it did not make with"):
        strange.build(variables())
