"""Each rank's share of the data, alone and in a real fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import agree, data, log
from hvd_keras.data import datasets
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 4  # per rank
TOGETHER = SIZE * BATCH
KINDS = ["arrays", "elements", "batches", "whole batches"]
BATCHED = ["batches", "whole batches"]
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to differ from")


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, size: int = BATCH, workers: int = 1) -> None:
        super().__init__(workers=workers)
        self.parts, self.size = parts, size

    def __len__(self) -> int:
        return -(-len(self.parts[0]) // self.size)

    def __getitem__(self, index: int):
        return tuple(p[index * self.size : (index + 1) * self.size] for p in self.parts)


@pytest.fixture(autouse=True)
def no_global_seed() -> None:
    """As a script without one; some tests set it, differently on each rank."""
    tf.random.set_seed(None)


def shard(kind: str, *parts, **arguments) -> tf.data.Dataset:
    if kind == "batches":
        return data.shard(Batches(*parts), **arguments)
    if kind == "arrays":
        return data.shard(parts, batch_size=BATCH, **arguments)
    rows = tf.data.Dataset.from_tensor_slices(parts)
    if kind == "whole batches":
        return data.shard(rows.batch(BATCH), **arguments)
    return data.shard(rows, batch_size=BATCH, **arguments)


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


LENGTHS = sorted({1, TOGETHER - 1, TOGETHER + 1, 2 * TOGETHER, 3 * TOGETHER - BATCH})


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pad_uses_each_row_once_and_all_batches_have_one_shape(kind: str, shuffle: bool) -> None:
    for length in LENGTHS:
        if kind in BATCHED and length < BATCH:
            continue  # one short batch is a source of shorter batches
        dataset = shard(kind, *numbered(length), shuffle=shuffle, uneven="pad")
        steps = job_pass(dataset)
        assert len(steps) == len(dataset) == -(-length // TOGETHER)
        assert sorted(rows_of(steps)) == list(range(length))
        for number, step in enumerate(steps):
            rows = min(TOGETHER, length - number * TOGETHER)
            assert list(step.values()) == pytest.approx([TOGETHER / rows] * rows)
            if not shuffle:
                assert sorted(step) == list(range(number * TOGETHER, number * TOGETHER + rows))
        assert len(dataset.element_spec) == 3
        assert {tuple(spec.shape) for spec in dataset.element_spec} == {(BATCH,)}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_share_gives_ranks_equally_many_rows_and_keeps_the_structure(
    kind: str, shuffle: bool
) -> None:
    for length in LENGTHS:
        if length < SIZE or (kind in BATCHED and length < BATCH):
            continue
        dataset = shard(kind, *numbered(length), shuffle=shuffle)
        assert len(dataset.element_spec) == 2
        steps = job_pass(dataset)
        whole, rest = divmod(length, TOGETHER)
        sizes = [TOGETHER] * whole + [rest // SIZE * SIZE] * (rest >= SIZE)
        assert [len(step) for step in steps] == sizes
        assert len(steps) == len(dataset)
        assert {len(x) * SIZE for x, _ in one_pass(dataset)} == set(sizes)  # as many on each rank
        assert len(set(rows_of(steps))) == length // SIZE * SIZE
        if not shuffle:
            assert sorted(rows_of(steps)) == list(range(length // SIZE * SIZE))
            for number, step in enumerate(steps):
                assert min(step) == number * TOGETHER


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
    dataset = shard(kind, *parts, shuffle=True, uneven="pad")
    epochs = [job_pass(dataset) for _ in range(3)]
    assert all(sorted(rows_of(epoch)) == parts[0].tolist() for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]

    again = shard(kind, *parts, shuffle=True, uneven="pad")
    assert [job_pass(again) for _ in range(2)] == epochs[:2]
    assert job_pass(shard(kind, *parts, shuffle=True, uneven="pad", start_epoch=2)) == epochs[2]
    assert job_pass(shard(kind, *parts, shuffle=True, uneven="pad", seed=1)) != epochs[0]


@pytest.fixture(scope="module")
def singles() -> list[hvd.ProcessSet]:
    """A process set of each rank."""
    return [hvd.add_process_set([rank]) for rank in range(SIZE)]


@pytest.mark.parametrize("kind", ["arrays", "elements"])
def test_order_does_not_depend_on_the_number_of_ranks(kind: str, singles) -> None:
    parts = numbered(2 * TOGETHER + 3)
    steps = job_pass(shard(kind, *parts, seed=5, uneven="pad"))
    source = tf.data.Dataset.from_tensor_slices(parts) if kind == "elements" else parts
    mine = data.shard(source, batch_size=TOGETHER, seed=5, uneven="pad", process_set=singles[RANK])
    for step, (rows, weights) in zip(steps, one_pass(mine), strict=True):
        assert step == {row: w for row, w in zip(rows, weights, strict=True) if w}


@several
def test_process_set_shares_among_its_ranks_only(singles) -> None:
    first = singles[0] if SIZE == 2 else hvd.add_process_set(range(SIZE - 1))
    if RANK == SIZE - 1:
        with pytest.raises(ValueError, match=f"rank {RANK} is not in"):
            data.shard(numbered(9), batch_size=2, process_set=first)
        with pytest.raises(ValueError, match=f"rank {RANK} is not in"):
            data.agree_on_steps(3, process_set=first)
    else:  # the last rank takes no part
        length = 5 * BATCH * (SIZE - 1)
        dataset = data.shard(numbered(length), batch_size=BATCH, process_set=first)
        assert len(dataset) == 5
        everyone = agree.gather_json("of the set", one_pass(dataset), first)
        rows = [row for mine in everyone for x, _ in mine for row in x]
        assert sorted(rows) == list(range(length))
        assert data.agree_on_steps(7 - RANK, process_set=first) == 7 - (SIZE - 2)
    with pytest.raises(ValueError, match=f"rank {RANK}: ValueError: batch_size=0"):
        data.shard(numbered(9), batch_size=0, process_set=singles[RANK])
    if SIZE > 2:
        hvd.remove_process_set(first)


def test_shuffle_buffer_of_a_dataset_moves_elements_by_less_than_its_size() -> None:
    length = 6 * TOGETHER
    steps = job_pass(shard("elements", *numbered(length), shuffle=3))
    assert sorted(rows_of(steps)) == list(range(length))
    assert any(sorted(step) != list(range(min(step), min(step) + TOGETHER)) for step in steps)
    for number, step in enumerate(steps):  # an element can come early by 2 at most
        assert max(step) <= (number + 1) * TOGETHER + 1


def test_batches_of_a_py_dataset_are_shuffled_whole_and_a_short_one_stays_last() -> None:
    dataset = data.shard(Batches(*numbered(9 * BATCH + 1), workers=3), seed=2, uneven="pad")
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
        (_, *_, last) = job_pass(shard(kind, x, y, own, shuffle=False, uneven="pad"))
        assert last == {length - 1: pytest.approx(length * TOGETHER)}
    nested = {"a": own, "b": np.stack([own, 2 * own], axis=1)}
    source = (x, {"a": y, "b": y}, nested)
    dataset = data.shard(source, batch_size=BATCH, shuffle=False, uneven="pad")
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
    together.fit(shard(kind, *parts, shuffle=False, uneven="pad"), epochs=2, verbose=0)
    assert np.abs(training.flat(alone) - start).max() > 1e-2, "training did nothing"
    np.testing.assert_allclose(training.flat(together), training.flat(alone), rtol=1e-4, atol=1e-5)
    training.assert_bit_identical_on_all_ranks(together)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_last_step_trains_like_the_short_batch_of_one_process(kind: str) -> None:
    x, y, _ = samples(2 * TOGETHER + 3 * SIZE)
    alone = training.dense_model()
    training.set_weights(alone, seed=0)
    alone.compile(optimizer=momentum(), loss="mse")
    alone.fit(x, y, batch_size=TOGETHER, epochs=2, shuffle=False, verbose=0)
    together = distributed_model()
    together.fit(shard(kind, x, y, shuffle=False), epochs=2, verbose=0)
    assert int(together.optimizer.iterations) == 6
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
    together.fit(shard("arrays", x, y, seed=7, uneven="pad"), epochs=3, verbose=0)
    np.testing.assert_allclose(training.flat(together), training.flat(alone), rtol=1e-4, atol=1e-5)

    resumed = distributed_model()
    resumed.fit(shard("arrays", x, y, seed=7, uneven="pad"), epochs=2, verbose=0)
    rest = shard("arrays", x, y, seed=7, start_epoch=2, uneven="pad")
    resumed.fit(rest, epochs=3, initial_epoch=2, verbose=0)
    np.testing.assert_array_equal(training.flat(resumed), training.flat(together))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_gives_the_mean_over_all_rows(kind: str) -> None:
    for length in (BATCH, 2 * TOGETHER + 1):
        x, y, _ = samples(length)
        model = training.dense_model()
        training.set_weights(model, seed=0)
        model.compile(loss="mse", weighted_metrics=["mae"])
        expected = model.evaluate(x, y, batch_size=TOGETHER, verbose=0, return_dict=True)
        dataset = shard(kind, x, y, shuffle=False, evaluation=True, uneven="pad")
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
    if kind not in BATCHED or len(short[0]) >= BATCH:  # else it is one of shorter batches
        text = error_of(shard, kind, *short, uneven="trim")
        assert f"{TOGETHER - 1} rows do not make whole steps of {TOGETHER}" in text
    text = error_of(shard, kind, *odd, uneven="error")
    assert f"{SIZE} ranks with batch_size={BATCH}" in text
    assert "'pad'" in text
    assert len(shard(kind, *numbered(2 * TOGETHER), uneven="error")) == 2
    assert "needs y" in error_of(shard, kind, odd[0], uneven="pad")
    assert len(shard(kind, numbered(TOGETHER)[0])) == 1
    if SIZE > 1 and kind not in BATCHED:
        assert "a row for each rank" in error_of(shard, kind, *numbered(SIZE - 1))


def test_sources_that_cannot_be_used_are_errors_on_all_ranks() -> None:
    elements = tf.data.Dataset.range(5)
    assert "empty" in error_of(data.shard, elements.take(0), batch_size=2)
    assert "empty" in error_of(data.shard, elements.filter(lambda i: i > 5), batch_size=2)
    assert "repeat()" in error_of(data.shard, elements.repeat(), batch_size=2)
    assert "none for a PyDataset" in error_of(data.shard, Batches(*numbered(5)), batch_size=2)
    assert "batch_size=None" in error_of(data.shard, numbered(5))
    assert "batch_size=0" in error_of(data.shard, numbered(5), batch_size=0)
    assert "[5, 4] rows" in error_of(data.shard, (np.ones(5), np.ones(4)), batch_size=2)
    assert "expected arrays" in error_of(data.shard, iter([1]), batch_size=2)
    assert "expected one of 'share'" in error_of(
        data.shard, numbered(5), batch_size=2, uneven="join"
    )
    assert "start_epoch=-1" in error_of(data.shard, numbered(5), batch_size=2, start_epoch=-1)
    assert "0 batches" in error_of(data.shard, Batches(*numbered(0)))


def tuples(dataset: tf.data.Dataset) -> list[tuple[int, ...]]:
    """The x of one pass, by batch."""
    return [tuple(x.numpy().tolist()) for x, *_ in dataset]


def of_all(dataset: tf.data.Dataset) -> list[list[int]]:
    """By step, the x of all ranks; they make as many steps, of as many rows."""
    everyone = agree.gather_json("of all", tuples(dataset))
    for step in zip(*everyone, strict=True):
        assert len({len(x) for x in step}) == 1
    return [sorted(row for x in step for row in x) for step in zip(*everyone, strict=True)]


LENGTH = 2 * TOGETHER + 3 * SIZE
IN_ORDER = [
    list(range(start, min(start + TOGETHER, LENGTH))) for start in range(0, LENGTH, TOGETHER)
]


def rows_dataset(length: int = LENGTH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(length))


@pytest.mark.parametrize(
    "make",
    [
        lambda: rows_dataset().batch(BATCH).map(lambda x, y: (x, y), num_parallel_calls=2),
        lambda: rows_dataset().batch(BATCH, num_parallel_calls=2).prefetch(2).cache(),
        lambda: tf.data.Dataset.zip(*(rows_dataset().map(f).batch(BATCH) for f in PARTS)),
        lambda: rows_dataset(LENGTH + 5).batch(BATCH).unbatch().take(LENGTH).batch(BATCH),
        lambda: tf.data.Dataset.range(1).flat_map(lambda i: rows_dataset().batch(BATCH)),
        lambda: rows_dataset().batch(TOGETHER).rebatch(BATCH),
    ],
)
def test_batched_dataset_gives_its_batches_to_the_ranks(make) -> None:
    dataset = data.shard(make())
    assert of_all(dataset) == IN_ORDER
    assert tuples(dataset)[0] == tuple(range(RANK * BATCH, (RANK + 1) * BATCH))
    assert of_all(data.shard(make(), batch_size=3))[0] == list(range(3 * SIZE))
    assert of_all(data.shard(make(), shuffle=True)) != IN_ORDER


PARTS = [lambda x, y: x, lambda x, y: y]


def test_length_of_a_batched_dataset_is_known() -> None:
    assert len(data.shard(rows_dataset().batch(BATCH))) == 3
    assert len(data.shard(rows_dataset().batch(BATCH, drop_remainder=True).prefetch(1))) >= 2
    assert len(data.shard(rows_dataset(TOGETHER).batch(BATCH).repeat(2))) == 2


def test_keras_directories_and_series_are_taken_for_what_they_are(directory) -> None:
    classes = ["a", "b"]
    if RANK == 0:
        for label in classes:
            (directory / label).mkdir()
            for number in range(TOGETHER):
                (directory / label / f"{number}.txt").write_text(f"{label} {number}")
    agree.gather_json("written", None)
    read = keras.utils.text_dataset_from_directory
    source = read(directory, batch_size=BATCH, seed=1, verbose=False)
    dataset = data.shard(source)
    assert len(dataset) == 2
    epochs = []
    for _ in range(2):
        texts = [text.decode() for x, _ in dataset for text in x.numpy()]
        epochs.append(agree.gather_json("texts", texts))
    everything = sorted(f"{label} {number}" for label in classes for number in range(TOGETHER))
    for epoch in epochs:
        assert sorted(text for of_rank in epoch for text in of_rank) == everything
    assert epochs[0] != epochs[1]  # it shuffles by itself
    if SIZE > 1:  # without a seed each rank shuffles in another way
        keras.utils.set_random_seed(RANK)
        unseeded = read(directory, batch_size=BATCH, verbose=False)
        assert "with the same seeds" in error_of(data.shard, unseeded)
    series = np.arange(TOGETHER + SIZE + 2, dtype="float32")
    source = keras.utils.timeseries_dataset_from_array(series, series, 3, batch_size=BATCH)
    steps = agree.gather_json("series", [y.numpy().tolist() for _, y in data.shard(source)])
    seen = sorted(row for of_rank in steps for step in of_rank for row in step)
    assert seen == list(range(TOGETHER + SIZE))


def test_rows_that_are_sequences_are_not_taken_for_batches() -> None:
    numbers = tf.data.Dataset.range(TOGETHER + 2)
    windows = numbers.window(3, shift=1, drop_remainder=True)
    sequences = windows.flat_map(lambda part: part.batch(3))
    firsts = [x.numpy()[:, 0].tolist() for x in data.shard(sequences, batch_size=BATCH)]
    expected = list(range(TOGETHER))
    if SIZE == 1:
        assert firsts == [expected]
    everyone = agree.gather_json("sequences", firsts)
    assert sorted(x for of_rank in everyone for step in of_rank for x in step) == expected
    squares = tf.data.Dataset.from_tensor_slices((np.ones((TOGETHER, 5)), np.ones((TOGETHER, 5))))
    assert len(data.shard(squares, batch_size=BATCH)) == 1
    spec = (tf.TensorSpec((None, 2)), tf.TensorSpec((None,)))
    unclear = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=spec)
    text = error_of(data.shard, unclear, batch_size=BATCH)
    assert "hvd.data.shard(dataset.unbatch(), batch_size=…)" in text
    assert "tf.ensure_shape" in text


def generated():
    yield from zip(*numbered(LENGTH), strict=True)


SCALARS = (tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.int64))
UNKNOWN = [
    lambda: rows_dataset(LENGTH + 7).filter(lambda x, y: x < LENGTH),
    lambda: tf.data.Dataset.from_generator(generated, output_signature=SCALARS),
    lambda: tf.data.Dataset.range(1).interleave(lambda i: rows_dataset()),
]


@pytest.mark.parametrize("make", UNKNOWN)
def test_dataset_of_unknown_length_ends_after_the_same_step_on_all_ranks(make) -> None:
    dataset = data.shard(make(), batch_size=BATCH)
    assert len(dataset) == 3
    assert of_all(dataset) == IN_ORDER  # in its own order: it may not fit into memory
    assert of_all(dataset) == IN_ORDER
    assert of_all(data.shard(make().batch(BATCH))) == IN_ORDER
    assert of_all(data.shard(make(), batch_size=BATCH, uneven="trim")) == IN_ORDER[:2]
    if SIZE > 1:
        differ = make().filter(lambda x, y: x < LENGTH - RANK)
        assert f"rank 1: {LENGTH - 1} rows" in error_of(data.shard, differ, batch_size=BATCH)
    shuffled = data.shard(make(), batch_size=BATCH, shuffle=True)
    epochs = [of_all(shuffled) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(row for x in epoch for row in x) == list(range(LENGTH)) for epoch in epochs)
    weighted = data.shard(make(), batch_size=BATCH, uneven="pad")
    assert [len(step) for step in job_pass(weighted)] == [TOGETHER, TOGETHER, 3 * SIZE]
    for *_, weights in data.shard(make(), batch_size=BATCH, uneven="pad", evaluation=True):
        assert set(weights.numpy()) <= {0, np.float32(3 * TOGETHER / LENGTH)}
    assert "whole steps" in error_of(data.shard, make(), batch_size=BATCH, uneven="error")


def test_fit_on_data_of_unknown_length_trains_like_one_process() -> None:
    x, y, _ = samples(2 * TOGETHER + SIZE)
    spec = (tf.TensorSpec((5,)), tf.TensorSpec((1,)))
    source = tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec)
    alone = training.dense_model()
    training.set_weights(alone, seed=0)
    alone.compile(optimizer=momentum(), loss="mse")
    alone.fit(source.batch(TOGETHER), epochs=3, verbose=0)
    together = distributed_model()
    together.fit(data.shard(source.batch(BATCH)), epochs=3, verbose=0)
    assert int(together.optimizer.iterations) == 9
    np.testing.assert_allclose(training.flat(together), training.flat(alone), rtol=1e-4, atol=1e-5)


def test_padded_batches_are_padded_anew_where_they_are_mixed() -> None:
    source = rows_dataset().map(lambda x, y: (tf.fill([x % 5 + 1], 7), y)).padded_batch(BATCH)
    for arguments in {}, {"batch_size": 3}, {"uneven": "pad"}:
        seen = []
        for x, y, *weights in data.shard(source, **arguments):
            real = weights[0].numpy() > 0 if weights else np.ones(len(y), bool)
            assert np.count_nonzero(x, axis=1)[real].tolist() == (-y % 5 + 1)[real].numpy().tolist()
            seen += (-y)[real].numpy().tolist()
        everyone = agree.gather_json("padded", seen)
        assert sorted(row for of_rank in everyone for row in of_rank) == list(range(LENGTH))


def test_batches_of_different_sizes_are_shared_so_that_ranks_have_equally_many_rows() -> None:
    lengths = np.arange(LENGTH) % 2 * 7 + 1
    rows = rows_dataset().map(lambda x, y: (tf.range(x % 2 * 7 + 1), y))
    source = rows.bucket_by_sequence_length(
        lambda x, y: tf.size(x), [5], [2 * BATCH, BATCH], pad_to_bucket_boundary=False
    )
    mine = [(x.shape[0], -y.numpy()) for x, y in data.shard(source)]
    everyone = agree.gather_json("buckets", [(size, y.tolist()) for size, y in mine])
    seen = [row for of_rank in everyone for _, y in of_rank for row in y]
    assert len(seen) == len(set(seen))
    assert LENGTH - len(seen) < len(everyone[0]) * SIZE
    for step in zip(*everyone, strict=True):
        assert len({size for size, _ in step}) == 1
    assert {len(x[0]) for x, _ in data.shard(source)} <= set(lengths)


def test_own_shuffle_of_a_dataset_is_kept_and_needs_a_seed() -> None:
    source = rows_dataset().shuffle(LENGTH, seed=3)
    plain = [[int(x) for x, _ in source] for _ in range(2)]
    dataset = data.shard(rows_dataset().shuffle(LENGTH, seed=3), batch_size=BATCH)
    for order in plain:  # each epoch as in one process
        steps = [sorted(order[i : i + TOGETHER]) for i in range(0, LENGTH, TOGETHER)]
        assert of_all(dataset) == steps
    if SIZE > 1:
        text = error_of(data.shard, rows_dataset().shuffle(9), batch_size=BATCH)
        assert "shuffle(…, seed=1)" in text
        unordered = rows_dataset().map(lambda x, y: (x, y), 2, deterministic=False)
        assert "deterministic=False" in error_of(data.shard, unordered, batch_size=BATCH)


@several
def test_same_shapes_with_other_values_are_refused_on_all_ranks() -> None:
    x, y = np.ones((9, 2)), np.arange(9)
    other = np.roll(y, RANK)
    assert "sample" in error_of(data.shard, (x, other), batch_size=2)
    rows = tf.data.Dataset.from_tensor_slices((x, other))
    assert "first element" in error_of(data.shard, rows, batch_size=2)
    assert "sample" in error_of(data.shard, Batches(x, other))
    augmented = np.random.default_rng(RANK).normal(size=(9, 2))  # x may differ, y may not
    assert len(data.shard(Batches(augmented, y), uneven="pad")) >= 1


def test_tensors_dicts_ragged_tensors_and_strings_are_sources() -> None:
    x, y = numbered(LENGTH)
    assert of_all(data.shard((tf.constant(x), y), batch_size=BATCH, shuffle=False)) == IN_ORDER
    words = np.array([str(i) for i in x])
    tree = {"words": words, "objects": words.astype(object)}
    for step, (row, target) in enumerate(data.shard((tree, y), batch_size=BATCH, shuffle=False)):
        expected = [str(-i) for i in target.numpy()]
        assert expected[0] == str(IN_ORDER[step][RANK])
        assert [word.decode() for word in row["words"].numpy()] == expected
        assert [word.decode() for word in row["objects"].numpy()] == expected
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(x.sum()), x)
    seen = []
    for rows, target in data.shard((ragged, y), batch_size=BATCH):
        assert rows.to_list() == tf.gather(ragged, -target).to_list()
        seen += (-target).numpy().tolist()
    everyone = agree.gather_json("ragged", seen)
    assert sorted(row for of_rank in everyone for row in of_rank) == list(range(LENGTH))
    uneven_rows = np.array([[1], [2, 3]], dtype=object)
    assert "tf.ragged.constant(x)" in error_of(data.shard, uneven_rows, batch_size=1)
    assert "np.asarray(x)" in error_of(data.shard, ([1, 2], [3, 4]), batch_size=1)


def test_data_frames_are_sources() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = numbered(LENGTH)
    frame = pandas.DataFrame({"a": x, "b": 2 * x})
    dataset = data.shard((frame, pandas.Series(y)), batch_size=BATCH, shuffle=False)
    assert of_all(dataset.map(lambda x, y: (x[:, 0], y))) == IN_ORDER
    mixed = pandas.DataFrame({"a": x, "b": [str(i) for i in x]})
    assert "astype('float32')" in error_of(data.shard, (mixed, y), batch_size=BATCH)


def test_custom_train_step_sees_the_structure_that_the_script_gave() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.dense_model()
            self.seen = []

        def train_step(self, batch):
            x, y = batch
            self.seen.append(len(batch))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.net(x) - y) ** 2)
            variables = self.net.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    x, y, _ = samples(TOGETHER + SIZE + 1)
    for source in (x, y), tf.data.Dataset.from_tensor_slices((x, y)):
        model = Own()
        model.compile(optimizer=hvd.DistributedOptimizer(momentum()))
        training.set_weights(model.net, seed=0)
        model.fit(data.shard(source, batch_size=BATCH), verbose=0)
        assert set(model.seen) == {2}
    ones = tf.data.Dataset.from_tensor_slices((x,))
    spec = data.shard(ones, batch_size=BATCH).element_spec
    assert isinstance(spec, tuple)


def test_rows_left_out_and_long_counts_are_told(monkeypatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(log.logger, "warning", lambda text, *values: told.append(text % values))
    data.shard(numbered(TOGETHER + SIZE + 1), batch_size=BATCH)
    assert told == []  # other rows in each epoch
    data.shard(numbered(TOGETHER + SIZE + 1), batch_size=BATCH, shuffle=False)
    if SIZE > 1:
        leaves_out = f"leaves out 1 of {TOGETHER + SIZE + 1} rows"
        assert [leaves_out in text for text in told] == [True] * (RANK == 0)
    told.clear()
    monkeypatch.setattr(datasets, "_WARNING_SECONDS", -1)
    data.shard(UNKNOWN[0](), batch_size=BATCH)
    assert told[0].startswith("hvd.data.shard counts")
    assert "assert_cardinality" in told[0]


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
    text = error_of(shard, kind, other_shape, other_shape)
    assert "(None, 3)" in text if kind == "whole batches" else "(3,)" in text
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
