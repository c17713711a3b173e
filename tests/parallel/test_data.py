"""Each rank's share of the data, alone and in a real fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import agree, data
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 4  # per rank
TOGETHER = SIZE * BATCH
KINDS = ["arrays", "elements", "batches"]
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to differ from")


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, size: int = BATCH, workers: int = 1) -> None:
        super().__init__(workers=workers)
        self.parts, self.size = parts, size

    def __len__(self) -> int:
        return -(-len(self.parts[0]) // self.size)

    def __getitem__(self, index: int):
        return tuple(p[index * self.size : (index + 1) * self.size] for p in self.parts)


def shard(kind: str, *parts, **arguments) -> tf.data.Dataset:
    if kind == "batches":
        return data.shard(Batches(*parts), **arguments)
    source = tf.data.Dataset.from_tensor_slices(parts) if kind == "elements" else parts
    return data.shard(source, batch_size=BATCH, **arguments)


def numbered(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that carry their number."""
    return np.arange(length), -np.arange(length)


def one_pass(dataset: tf.data.Dataset) -> list[list[list[float]]]:
    """By step: the numbers of this rank's rows, and their weights."""
    steps = []
    for x, y, *weights in dataset:
        np.testing.assert_array_equal(x, -y)
        steps.append([x.numpy().tolist(), (weights[0] if weights else tf.ones(len(x))).numpy()])
    return [[x, weights.tolist()] for x, weights in steps]


def job_pass(dataset: tf.data.Dataset) -> list[dict[int, float]]:
    """By step: the numbers of all ranks' rows that have a weight, with these; each only once."""
    everyone = agree.gather_json("pass", one_pass(dataset))
    steps = []
    for of_ranks in zip(*everyone, strict=True):  # strict: as many steps on all ranks
        rows = [row for x, weights in of_ranks for row in zip(x, weights, strict=True) if row[1]]
        steps.append(dict(rows))
        assert len(steps[-1]) == len(rows), "a row twice"
    return steps


def rows_of(steps: list[dict[int, float]]) -> list[int]:
    return [row for step in steps for row in step]


def error_of(call, *arguments, **named) -> str:
    """The text of the ValueError, the same on all ranks, none of which waits for another."""
    with pytest.raises(ValueError, match=r"hvd\.data") as caught:
        call(*arguments, **named)
    texts = agree.gather_json("error", str(caught.value))
    assert set(texts) == {texts[0]}
    return texts[0]


LENGTHS = sorted(
    {1, SIZE, TOGETHER - 1, TOGETHER, TOGETHER + 1, 2 * TOGETHER - BATCH, 3 * TOGETHER - 1}
)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pad_uses_each_row_once_and_all_batches_have_one_shape(kind: str, shuffle: bool) -> None:
    for length in LENGTHS:
        if kind == "batches" and length < BATCH:
            continue  # a PyDataset of one short batch is one of shorter batches
        dataset = shard(kind, *numbered(length), shuffle=shuffle)
        steps = job_pass(dataset)
        assert len(steps) == len(dataset) == -(-length // TOGETHER)
        assert sorted(rows_of(steps)) == list(range(length))
        for number, step in enumerate(steps):
            rows = min(TOGETHER, length - number * TOGETHER)
            assert list(step.values()) == pytest.approx([TOGETHER / rows] * rows)
            if not shuffle:
                assert sorted(step) == list(range(number * TOGETHER, number * TOGETHER + rows))
        assert {tuple(spec.shape) for spec in dataset.element_spec} == {(BATCH,)}
        assert len(dataset.element_spec) == (3 if length % TOGETHER else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_trim_drops_the_incomplete_step_only(kind: str) -> None:
    for length in LENGTHS:
        if length < TOGETHER:
            continue
        for shuffle in False, True:
            dataset = shard(kind, *numbered(length), shuffle=shuffle, uneven="trim")
            steps = job_pass(dataset)
            assert len(steps) == len(dataset) == length // TOGETHER
            assert all(list(step.values()) == [1.0] * TOGETHER for step in steps)
            assert len(set(rows_of(steps))) == len(steps) * TOGETHER
            if not shuffle:
                assert sorted(rows_of(steps)) == list(range(len(steps) * TOGETHER))


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_an_order_of_its_own_that_a_rerun_repeats(kind: str) -> None:
    # What the program does with its own seeds, differently on each rank, must not matter.
    tf.random.set_seed(RANK)
    np.random.seed(RANK)
    parts = numbered(9 * TOGETHER + 1)
    dataset = shard(kind, *parts)
    epochs = [job_pass(dataset) for _ in range(3)]
    assert all(sorted(rows_of(epoch)) == parts[0].tolist() for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]

    again = shard(kind, *parts)
    assert [job_pass(again) for _ in range(2)] == epochs[:2]
    assert job_pass(shard(kind, *parts, start_epoch=2)) == epochs[2]
    assert job_pass(shard(kind, *parts, seed=1)) != epochs[0]


@pytest.mark.parametrize("kind", ["arrays", "elements"])
def test_order_does_not_depend_on_the_number_of_ranks(kind: str, monkeypatch) -> None:
    parts = numbered(2 * TOGETHER + 3)
    steps = job_pass(shard(kind, *parts, seed=5))
    monkeypatch.setattr(data.rank_info, "size", lambda: 1)
    monkeypatch.setattr(data.rank_info, "rank", lambda: 0)
    source = tf.data.Dataset.from_tensor_slices(parts) if kind == "elements" else parts
    alone = one_pass(data.shard(source, batch_size=TOGETHER, seed=5))
    for step, (rows, weights) in zip(steps, alone, strict=True):
        assert step == {row: w for row, w in zip(rows, weights, strict=True) if w}


def test_shuffle_buffer_of_a_dataset_moves_elements_by_less_than_its_size() -> None:
    length = 6 * TOGETHER
    steps = job_pass(shard("elements", *numbered(length), shuffle=3))
    assert sorted(rows_of(steps)) == list(range(length))
    assert any(sorted(step) != list(range(min(step), min(step) + TOGETHER)) for step in steps)
    for number, step in enumerate(steps):  # an element can come early by 2 at most
        assert max(step) <= (number + 1) * TOGETHER + 1


def test_batches_of_a_py_dataset_are_shuffled_whole_and_a_short_one_stays_last() -> None:
    dataset = data.shard(Batches(*numbered(9 * BATCH + 1), workers=3), seed=2)
    mine = one_pass(dataset)
    order = [*np.random.default_rng([2, 0]).permutation(9), 9]
    for step, (rows, weights) in enumerate(mine):
        place = step * SIZE + RANK
        real = [row for row, weight in zip(rows, weights, strict=True) if weight]
        if place < 9:
            assert real == list(range(order[place] * BATCH, (order[place] + 1) * BATCH))
        else:
            assert real == ([9 * BATCH] if place == 9 else [])


def test_own_sample_weights_are_scaled_not_replaced() -> None:
    length = TOGETHER + 1
    x, y = numbered(length)
    own = np.arange(1, length + 1)
    for kind in KINDS:
        (_, *_, last) = job_pass(shard(kind, x, y, own, shuffle=False))
        assert last == {length - 1: pytest.approx(length * TOGETHER)}
    nested = {"a": own, "b": np.stack([own, 2 * own], axis=1)}
    dataset = data.shard((x, {"a": y, "b": y}, nested), batch_size=BATCH, shuffle=False)
    *_, (rows, _, weights) = dataset
    real = (rows.numpy() == length - 1) & (weights["a"].numpy() > 0)
    assert real.sum() == (RANK == 0)
    expected = np.where(real, length * TOGETHER, 0)
    np.testing.assert_allclose(weights["a"], expected)
    np.testing.assert_allclose(weights["b"], np.stack([expected, 2 * expected], axis=1))


def samples(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x, y = random.normal(size=(length, 5)), random.normal(size=(length, 1))
    return (
        x.astype("float32"),
        y.astype("float32"),
        random.uniform(0.5, 2, length).astype("float32"),
    )


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def distributed_model() -> keras.Model:
    model = training.dense_model()
    training.set_weights(model, seed=0)
    model.compile(optimizer=hvd.DistributedOptimizer(momentum()), loss="mse")
    return model


@pytest.mark.parametrize(("rest", "weighted"), [(1, False), (TOGETHER - 2, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_job_trains_like_one_process(kind: str, rest: int, weighted: bool) -> None:
    parts = samples(2 * TOGETHER + rest)[: 3 if weighted else 2]
    alone = training.dense_model()
    training.set_weights(alone, seed=0)
    start = training.flat(alone)
    alone.compile(optimizer=momentum(), loss="mse")
    own = {"sample_weight": parts[2]} if weighted else {}
    alone.fit(*parts[:2], **own, batch_size=TOGETHER, epochs=2, shuffle=False, verbose=0)

    together = distributed_model()
    together.fit(shard(kind, *parts, shuffle=False), epochs=2, verbose=0)
    assert np.abs(training.flat(alone) - start).max() > 1e-2, "training did nothing"
    np.testing.assert_allclose(training.flat(together), training.flat(alone), rtol=1e-4, atol=1e-5)
    training.assert_bit_identical_on_all_ranks(together)


def test_shuffled_epochs_of_fit_are_those_of_one_process_and_can_be_resumed() -> None:
    x, y, _ = samples(2 * TOGETHER + 3)
    alone = training.dense_model()
    training.set_weights(alone, seed=0)
    alone.compile(optimizer=momentum(), loss="mse")
    for epoch in range(3):
        order = np.random.default_rng([7, epoch]).permutation(len(x))
        alone.fit(x[order], y[order], batch_size=TOGETHER, shuffle=False, verbose=0)

    together = distributed_model()
    together.fit(shard("arrays", x, y, seed=7), epochs=3, verbose=0)
    np.testing.assert_allclose(training.flat(together), training.flat(alone), rtol=1e-4, atol=1e-5)

    resumed = distributed_model()
    resumed.fit(shard("arrays", x, y, seed=7), epochs=2, verbose=0)
    rest = shard("arrays", x, y, seed=7, start_epoch=2)
    resumed.fit(rest, epochs=3, initial_epoch=2, verbose=0)
    np.testing.assert_array_equal(training.flat(resumed), training.flat(together))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_gives_the_mean_over_all_rows(kind: str) -> None:
    for length in (1, 2 * TOGETHER + 1):
        x, y, _ = samples(length)
        model = training.dense_model()
        training.set_weights(model, seed=0)
        model.compile(loss="mse", weighted_metrics=["mae"])
        expected = model.evaluate(x, y, batch_size=TOGETHER, verbose=0, return_dict=True)
        dataset = shard(kind, x, y, shuffle=False, evaluation=True)
        mine = model.evaluate(dataset, verbose=0, return_dict=True)
        rows = sum(int(np.count_nonzero(w[0]) if w else len(x)) for x, _, *w in dataset)
        everyone = agree.gather_json("evaluated", [mine, rows])
        loss = np.mean([theirs["loss"] for theirs, _ in everyone])
        assert loss == pytest.approx(expected["loss"], rel=1e-5)
        mae = sum(theirs["mae"] * rows for theirs, rows in everyone) / length
        assert mae == pytest.approx(expected["mae"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_do_not_fit_are_errors_on_all_ranks(kind: str) -> None:
    short, odd = numbered(max(1, TOGETHER - 1)), numbered(TOGETHER + 1)
    if kind != "batches" or len(short[0]) >= BATCH:  # else it is one of shorter batches
        text = error_of(shard, kind, *short, uneven="trim")
        assert f"{TOGETHER - 1} rows do not make whole steps of {TOGETHER}" in text
    text = error_of(shard, kind, *odd, uneven="error")
    assert f"{SIZE} ranks with batch_size={BATCH}" in text
    assert "'pad'" in text
    assert len(shard(kind, *numbered(2 * TOGETHER), uneven="error")) == 2
    assert "needs y" in error_of(shard, kind, odd[0])
    assert len(shard(kind, numbered(TOGETHER)[0])) == 1


def test_sources_that_cannot_be_used_are_errors_on_all_ranks() -> None:
    elements = tf.data.Dataset.range(5)
    assert "repeat()" in error_of(data.shard, elements.repeat(), batch_size=2)
    unknown = elements.filter(lambda i: i > 2)
    assert "assert_cardinality" in error_of(data.shard, unknown, batch_size=2)
    assert "none for a PyDataset" in error_of(data.shard, Batches(*numbered(5)), batch_size=2)
    assert "batch_size=None" in error_of(data.shard, numbered(5))
    assert "batch_size=0" in error_of(data.shard, numbered(5), batch_size=0)
    assert "[5, 4] rows" in error_of(data.shard, (np.ones(5), np.ones(4)), batch_size=2)
    assert "expected arrays" in error_of(data.shard, iter([1]), batch_size=2)
    assert "expected 'pad'" in error_of(data.shard, numbered(5), batch_size=2, uneven="join")
    assert "start_epoch=-1" in error_of(data.shard, numbered(5), batch_size=2, start_epoch=-1)
    assert "0 batches" in error_of(data.shard, Batches(*numbered(0)))


def test_a_py_dataset_of_unequal_batches_is_refused() -> None:
    class Unequal(Batches):
        def __getitem__(self, index: int):
            return tuple(part[: 3 if index == 1 else 4] for part in self.parts)

    dataset = data.shard(Unequal(*numbered(16 * SIZE)), shuffle=False)
    if RANK == 1 % SIZE:
        with pytest.raises(tf.errors.OpError, match="batch 1 of the PyDataset has 3 rows"):
            one_pass(dataset)


@several
def test_an_error_on_one_rank_is_one_on_all() -> None:
    text = error_of(data.shard, numbered(5), batch_size=None if RANK == 1 else 2)
    assert "rank 0: None, rank 1: ValueError: batch_size=None" in text

    class Broken(Batches):
        def __getitem__(self, index: int):
            if RANK == 0:
                raise OSError("no such file")
            return super().__getitem__(index)

    assert "rank 0: OSError: no such file, rank 1: None" in error_of(
        data.shard, Broken(*numbered(5))
    )


@several
@pytest.mark.parametrize("kind", KINDS)
def test_sources_that_differ_are_refused_on_all_ranks(kind: str) -> None:
    text = error_of(shard, kind, *numbered(9 + RANK))
    assert "rank 0: 9 rows" in text
    assert "rank 1: 10 rows" in text
    other_dtype = np.ones(9, "int32" if RANK == 1 else "float32")
    assert "int32" in error_of(shard, kind, other_dtype, other_dtype)
    other_shape = np.ones((9, 2 + RANK))
    assert "(3,)" in error_of(shard, kind, other_shape, other_shape)
    assert "seed=1" in error_of(shard, kind, *numbered(9), seed=RANK)
    same_length = Batches(*numbered(24), size=2 + RANK)
    assert "batch_size=3" in error_of(data.shard, same_length)
    assert len(shard(kind, *numbered(9))) >= 1


def test_steps_of_ranks_with_data_of_their_own() -> None:
    assert data.agree_on_steps(3 + RANK) == 3
    batches = tf.data.Dataset.range(20 - RANK).batch(4)
    assert data.agree_on_steps(batches) == -(-(20 - SIZE + 1) // 4)
    assert data.agree_on_steps(Batches(*numbered(5 * (1 + RANK)))) == 2
    assert data.agree_on_steps(2, uneven="error") == 2
    unknown = tf.data.Dataset.range(9).filter(lambda i: i > 2)
    last = RANK == SIZE - 1
    assert data.agree_on_steps(4 if last else unknown) == 4
    assert data.agree_on_steps(4 if last else batches.repeat()) == 4
    assert "no length is known" in error_of(data.agree_on_steps, unknown)
    text = error_of(data.agree_on_steps, 0 if last else 5)
    assert "a rank has no data" in text
    assert f"rank {SIZE - 1}: 0" in text
    assert "TypeError" in error_of(data.agree_on_steps, [] if last else 5)
    assert "expected 'trim'" in error_of(data.agree_on_steps, 5, uneven="pad")
    if SIZE > 1:
        text = error_of(data.agree_on_steps, 5 + RANK, uneven="error")
        assert "rank 0: 5, rank 1: 6" in text


def test_fit_with_data_of_each_rank_makes_the_agreed_steps() -> None:
    x, y, _ = samples(BATCH * (2 + 3 * RANK) + 1)
    mine = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    steps = data.agree_on_steps(mine)
    assert steps == 3
    model = distributed_model()
    model.fit(mine.repeat(), steps_per_epoch=steps, epochs=3, verbose=0)
    assert int(model.optimizer.iterations) == 9
    training.assert_bit_identical_on_all_ranks(model)
