"""tf.data.Datasets of rows and of batches, of known and unknown length, for hvd.data.shard."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import data
from hvd_keras.data.tensorflow import datasets, sharding
from hvd_keras.runtime import agree, log
from tests.harness import training
from tests.harness.shards import (
    BATCH,
    IN_ORDER,
    LENGTH,
    RANK,
    SIZE,
    TOGETHER,
    distributed_model,
    error_of,
    job_pass,
    numbered,
    of_all,
    rows_dataset,
    rows_of,
    samples,
    shard,
    tuples,
)

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(autouse=True)
def no_global_seed() -> None:
    """Resets the global seed, which some tests set differently on each rank."""
    tf.random.set_seed(None)


@pytest.mark.cases(1)
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


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 3}, {"shuffle": True}, {"uneven": "pad"}])
def test_a_map_may_change_the_number_of_rows(arguments) -> None:
    def twice(x, y):
        return tf.concat([x, x + LENGTH], 0), tf.concat([y, y - LENGTH], 0)

    dataset = data.shard(rows_dataset().batch(BATCH).map(twice), **arguments)
    assert sorted(rows_of(job_pass(dataset))) == [*range(2 * LENGTH)]
    # Then fit asks in each step how many rows each rank has.
    size = sharding.batch_of(dataset)
    assert size == sharding.batch_of(dataset.map(lambda x, *y: (x / 2, *y)).prefetch(1))
    assert sharding.batch_of(dataset.map(lambda x, *_: x[x > 9])) is None


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
    if SIZE > 1:  # without a seed each rank shuffles differently
        keras.utils.set_random_seed(RANK)
        unseeded = read(directory, batch_size=BATCH, verbose=False)
        assert "need the same seeds" in error_of(data.shard, unseeded)
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


@pytest.mark.cases(1)
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
        assert f"rank 1: {LENGTH - 1}" in error_of(data.shard, differ, batch_size=BATCH)
    shuffled = data.shard(make(), batch_size=BATCH, shuffle=True)
    epochs = [of_all(shuffled) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(row for x in epoch for row in x) == list(range(LENGTH)) for epoch in epochs)
    weighted = data.shard(make(), batch_size=BATCH, uneven="pad")
    assert [len(step) for step in job_pass(weighted)] == [TOGETHER, TOGETHER, 3 * SIZE]
    for *_, weights in data.shard(make(), batch_size=BATCH, uneven="pad", evaluation=True):
        assert set(weights.numpy()) <= {0, np.float32(3 * TOGETHER / LENGTH)}
    assert "whole steps" in error_of(data.shard, make(), batch_size=BATCH, uneven="error")


@pytest.mark.parametrize("batch_size", [None, 3])
def test_batches_of_ragged_and_sparse_rows_are_filled_for_pad(batch_size) -> None:
    def as_rows(x):  # x numbers of the value x
        ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(x, x), x)
        return {"ragged": ragged, "sparse": ragged.to_sparse()}, -x

    numbers = tf.data.Dataset.range(LENGTH).filter(lambda x: x >= 0)  # of unknown length
    dataset = data.shard(numbers.batch(BATCH).map(as_rows), batch_size=batch_size, uneven="pad")
    seen = []
    for rows, y, weights in dataset:
        for row in np.flatnonzero(weights):
            seen.append(-int(y[row]))
            assert rows["ragged"][row].numpy().tolist() == seen[-1:] * seen[-1]
            assert tf.sparse.to_dense(rows["sparse"]).numpy()[row].sum() == seen[-1] ** 2
    everyone = agree.gather_json("seen", seen)
    assert sorted(row for theirs in everyone for row in theirs) == list(range(LENGTH))


def test_padded_batches_are_padded_anew_where_they_are_mixed() -> None:
    rows = rows_dataset().map(lambda x, y: (tf.fill([x % 5 + 1], 7), y))
    values = np.int32(-1), np.int64(0)
    for padding in None, values:
        source, pad = rows.padded_batch(BATCH, padding_values=padding), -1 if padding else 0
        for arguments in {}, {"batch_size": 3}, {"uneven": "pad"}:
            seen = []
            for x, y, *weights in data.shard(source, **arguments):
                real = weights[0].numpy() > 0 if weights else np.ones(len(y), bool)
                lengths = np.sum(x == 7, axis=1) + 1j * np.sum(x == pad, axis=1)
                length = (-y % 5 + 1).numpy()
                expected = length + 1j * (x.shape[1] - length)
                assert lengths[real].tolist() == expected[real].tolist()
                seen += (-y)[real].numpy().tolist()
            everyone = agree.gather_json("padded", seen)
            assert sorted(row for of_rank in everyone for row in of_rank) == list(range(LENGTH))
        mapped = source.map(lambda x, y: ({"x": x}, y))
        if padding is None:
            data.shard(mapped, batch_size=3)
        else:
            assert "Call map() after shard" in error_of(data.shard, mapped, batch_size=3)
    function = {"element_length_func": lambda x, y: tf.size(x), "padding_values": values}
    bucketed = rows.bucket_by_sequence_length(
        **function, bucket_boundaries=[3], bucket_batch_sizes=[BATCH, BATCH]
    )
    assert "within a function" in error_of(data.shard, bucketed, shuffle=True)


@pytest.mark.ranks(2, 3)
def test_a_shuffle_of_batches_of_which_one_may_be_no_step_is_an_error() -> None:
    length = TOGETHER + 1
    batches = rows_dataset(length).batch(BATCH).shuffle(9, seed=1)
    assert "shuffle() before batch()" in error_of(data.shard, batches)
    assert "shuffle() before batch()" in error_of(data.shard, batches, uneven="trim")
    right = [
        rows_dataset(length + SIZE).batch(BATCH).shuffle(9, seed=1),
        rows_dataset(length).batch(BATCH, drop_remainder=True).shuffle(9, seed=1),
        rows_dataset(length).shuffle(length, seed=1).batch(BATCH).skip(0),
    ]
    for dataset in (*map(data.shard, right), data.shard(batches, batch_size=BATCH)):
        assert {len(of_all(dataset)) for _ in range(5)} == {len(dataset)}


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
    # `shard` begins the first pass to compare its first row over the ranks.
    plain = [[int(x) for x, _ in source] for _ in range(3)][1:]
    dataset = data.shard(rows_dataset().shuffle(LENGTH, seed=3), batch_size=BATCH)
    for order in plain:  # each epoch as in one process
        steps = [sorted(order[i : i + TOGETHER]) for i in range(0, LENGTH, TOGETHER)]
        assert of_all(dataset) == steps
    if SIZE > 1:

        def unordered() -> tf.data.Dataset:
            return rows_dataset().map(lambda x, y: (x, y), 2, deterministic=False)

        one = tf.data.Dataset.range(1)
        for text, make in {
            "shuffle(…, seed=1)": lambda: rows_dataset().shuffle(9),
            "deterministic=False": unordered,
        }.items():
            within = one.flat_map(lambda _, make=make: one.interleave(lambda _: make()))
            for rows in make(), within:
                assert text in error_of(data.shard, rows, batch_size=BATCH)


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


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("declared", [True, False])
def test_rows_beyond_the_number_that_was_declared_or_counted_are_an_error(
    declared: bool, batched: bool
) -> None:
    numbers = [4 * SIZE] * 3  # rows in the passes that count them

    def rows():
        yield from np.arange(numbers.pop() if numbers else 8 * SIZE, dtype="float32")

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.float32))
    if declared:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(4 * SIZE))
    size = {} if batched else {"batch_size": 2}
    mine = hvd.data.shard(dataset.batch(2) if batched else dataset, **size, shuffle=False)
    numbers.clear()
    with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain"):
        list(mine)


def test_a_tensorflow_that_hides_how_a_dataset_shuffles_is_refused(monkeypatch) -> None:
    """Otherwise an unseeded shuffle, whose order differs by rank, would go unseen."""
    monkeypatch.setattr(datasets, "kind_of", lambda node: type(node).__name__)  # another name
    datasets._check_names.cache_clear()
    with pytest.raises(RuntimeError, match=r"cannot see how TensorFlow .* shuffles"):
        data.shard(rows_dataset().shuffle(9), batch_size=BATCH)


@pytest.mark.parametrize("kind", ["arrays", "elements"])
def test_repeated_data_of_several_fits_whatever_a_prefetch_has_begun(kind: str) -> None:
    """A fit goes on with the pass after those that the fits before have read."""
    x, y, _ = samples(3 * TOGETHER)

    def late(x, y):
        wait = tf.numpy_function(lambda: time.sleep(0.05 * RANK) or np.float32(0), [], tf.float32)
        return x + tf.ensure_shape(wait, []), y

    together, expected = distributed_model(), distributed_model()
    repeated = shard(kind, x, y, seed=7, shuffle=True).map(late).repeat().prefetch(8)
    for steps in (2, 4):
        together.fit(repeated, steps_per_epoch=steps, verbose=0)
    for epoch, steps in [(0, 2), (1, 3), (2, 1)]:
        rest = shard(kind, x, y, seed=7, shuffle=True, start_epoch=epoch)
        expected.fit(rest, steps_per_epoch=steps, verbose=0)
    np.testing.assert_array_equal(training.flat(together), training.flat(expected))


@pytest.mark.ranks(2, 3)
def test_repeated_data_that_shuffle_themselves_are_whole_in_each_fit() -> None:
    seen: list[int] = []

    def noted(x):
        def look(x):
            seen.extend(x[:, 0].astype(int).tolist())
            return x

        return tf.ensure_shape(tf.numpy_function(look, [x], x.dtype), x.shape)

    rows = np.arange(2 * TOGETHER, dtype="float32")[:, np.newaxis]
    x = tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(2 * TOGETHER, seed=1)
    base = data.shard(x, batch_size=BATCH)
    repeated = base.map(lambda x, y: (noted(x), y)).repeat().prefetch(1 + 7 * RANK)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "relu", True, "zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    for _ in range(3):
        seen.clear()
        model.fit(repeated, steps_per_epoch=2, verbose=0)
        everyone = agree.gather_json("seen", seen[: 2 * BATCH])
        assert sorted(row for mine in everyone for row in mine) == list(range(2 * TOGETHER))
    with pytest.raises(ValueError, match="once more for validation_data"):
        model.fit(repeated, steps_per_epoch=2, validation_data=base, verbose=0)
    model.fit(base, verbose=0)


@pytest.mark.ranks(2)
def test_a_cache_file_of_all_ranks_is_refused(directory) -> None:
    model = distributed_model()
    rows = data.shard(training.data(model, SIZE), batch_size=4)
    with pytest.raises(ValueError, match=r"is one file for several ranks(.|\n)*by rank"):
        model.fit(rows.cache(f"{directory}/all").prefetch(2), verbose=0)
    model.fit(rows.cache(f"{directory}/{RANK}"), verbose=0)
