"""hvd.data.shard and agree_on_steps, alone and in a real fit."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import data
from hvd_keras.runtime import agree
from tests.harness import training
from tests.harness.shards import (
    BATCH,
    IN_ORDER,
    LENGTH,
    RANK,
    SIZE,
    TOGETHER,
    Batches,
    distributed_model,
    error_of,
    job_pass,
    momentum,
    numbered,
    of_all,
    one_pass,
    rows_of,
    samples,
    shard,
)

pytestmark = pytest.mark.ranks(1, 2, 3)
KINDS = ["arrays", "elements", "batches", "whole batches"]
BATCHED = ["batches", "whole batches"]
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to differ from")


LENGTHS = sorted({1, TOGETHER - 1, TOGETHER + 1, 2 * TOGETHER, 3 * TOGETHER - BATCH})


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_an_order_of_its_own_that_a_rerun_repeats(kind: str) -> None:
    # The program's own seeds, which differ by rank here, must not matter.
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
    tf.random.set_seed(None)  # for the tests that follow


def singles() -> list[hvd.ProcessSet]:
    """A process set for each rank."""
    return [hvd.add_process_set([rank]) for rank in range(SIZE)]


@several
def test_process_set_shares_among_its_ranks_only() -> None:
    own = singles()
    first = own[0] if SIZE == 2 else hvd.add_process_set(range(SIZE - 1))
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
    with pytest.raises(ValueError, match=r"data\.shard: batch_size=0"):
        data.shard(numbered(9), batch_size=0, process_set=own[RANK])


@several
def test_data_of_another_process_set_are_refused() -> None:
    alone = singles()[RANK]
    model, (x, y, _) = distributed_model(), samples(2 * TOGETHER)
    whole, own = (
        data.shard((x, y), batch_size=BATCH, process_set=process_set)
        for process_set in (hvd.global_process_set, alone)
    )
    refused = pytest.raises(ValueError, match="among other ranks")
    average = {"callbacks": [hvd.callbacks.MetricAverageCallback()], "verbose": 0}
    for train, validation in (own, None), (whole, own):
        with refused:
            model.fit(train, validation_data=validation, **average)
    with refused:
        model.evaluate(own, **average)
    model.fit(whole, validation_data=own, verbose=0)  # each has its own metrics
    model = training.dense_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=alone)
    model.compile(optimizer, loss="mse")
    with refused:
        model.fit(whole, verbose=0)
    model.fit(own, verbose=0)


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


def test_a_py_datasets_own_shuffle_is_told(warned) -> None:
    kind = type("Shuffled", (Batches,), {"on_epoch_end": lambda self: None})
    data.shard(kind(*numbered(9 * BATCH)))
    assert any("on_epoch_end of Shuffled" in text for text in warned) == (RANK == 0)


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


@pytest.mark.cases(2)
@pytest.mark.parametrize("labels", ["numbers", "column", "one-hot", "sequences"])
def test_class_weights_multiply_those_of_padded_rows(labels: str) -> None:
    x, *_ = samples(2 * TOGETHER + 1)
    y = np.arange(len(x)) % 3
    if labels == "sequences":
        x, y = np.stack([x, 2 * x], 1), np.stack([y, y[::-1]], 1)[..., np.newaxis]
    y = {"column": y[:, np.newaxis], "one-hot": np.eye(3)[y.ravel() % 3]}.get(labels, y)
    loss = f"{'' if labels == 'one-hot' else 'sparse_'}categorical_crossentropy"

    def model(optimizer) -> keras.Model:
        ones = {"kernel_initializer": "ones", "activation": "softmax"}
        made = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(3, **ones)])
        made.compile(optimizer, loss=loss, run_eagerly=True)
        return made

    alone, together = model(momentum()), model(hvd.DistributedOptimizer(momentum()))
    weights = {"class_weight": {0: 0.5, 2: 4.0}, "epochs": 2, "verbose": 0}
    alone.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(TOGETHER), **weights)
    rows = data.shard((x, y), batch_size=BATCH, shuffle=False, uneven="pad")
    together.fit(rows, callbacks=[hvd.callbacks.MetricAverageCallback()], **weights)
    training.assert_close(together, alone)

    together.fit(rows.map(lambda x, y, weights: (x, y)), **weights)  # as Keras does it
    own = data.shard((x, y, np.ones(len(x))), batch_size=BATCH, shuffle=False, uneven="pad")
    with pytest.raises(ValueError, match=r"class_weight.*sample_weight"):
        together.fit(own, **weights)


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
    x = np.arange(8.0 * (1 + RANK))
    for more, told in ((x,), "several sources"), ((32,), r"second argument 32.* batch_size=32"):
        with pytest.raises(TypeError, match=told):
            hvd.data.shard(x, *more)
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
    assert "seed=1.5" in error_of(data.shard, numbered(5), batch_size=2, seed=1.5)
    assert len(data.shard(numbered(8), batch_size=np.int64(2), seed=np.int32(1))) == 4 // SIZE
    for size in "2", 2.0:
        assert f"batch_size={size!r}, expected an i" in error_of(
            data.shard, numbered(5), batch_size=size
        )
    assert "0 batches" in error_of(data.shard, Batches(*numbered(0)))


@several
def test_same_shapes_with_other_values_are_refused_on_all_ranks() -> None:
    x, y = np.ones((9, 2)), np.arange(9)
    other = np.roll(y, RANK)
    text = error_of(data.shard, (x, other), batch_size=2)
    assert "the ranks have different values or orders of rows: rank 0: sample " in text
    assert "9" not in text.partition(": sample ")[0]  # nothing that is equal
    for labels in other, np.where(y == 8, RANK, 0):  # which differ from the first or last row on
        rows = tf.data.Dataset.from_tensor_slices((x, labels))
        assert "first elements" in error_of(data.shard, rows, batch_size=2)
    assert "sample" in error_of(data.shard, Batches(x, other))


class Augmented(Batches):
    """Adds noise to x: of NumPy's global generator, or of one of its own."""

    draw = staticmethod(np.random.normal)

    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        return x + self.draw(size=x.shape), y


@several
def test_rows_of_equal_labels_in_another_order_are_refused_unless_x_is_random(warned) -> None:
    x, y = np.arange(9, dtype="float32"), np.zeros(9, "int32")
    other = np.roll(x, RANK)
    names = tf.data.Dataset.from_tensor_slices(([f"{row}.png" for row in other], y))
    text = "different x of rows with equal y"
    assert text in error_of(data.shard, names, batch_size=2)
    for source in names.batch(2), Batches(other, y), Augmented(other, y):
        assert text in error_of(data.shard, source)

    np.random.seed(RANK)
    own = Augmented(x, y)
    own.draw = np.random.default_rng(RANK).normal
    rounded = Batches(x * np.float32(1 + 1e-7 * RANK), y)  # as by another processor
    for source in Augmented(x, y), own, rounded:
        assert len(data.shard(source, uneven="pad")) > 0
    drawn = agree.gather_json("drawn", float(np.random.normal()))
    assert len(set(drawn)) == SIZE  # the script's random numbers go on
    assert not warned

    def shuffled():
        yield from zip(np.random.permutation(x), y, strict=True)

    specs = tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int32)
    data.shard(tf.data.Dataset.from_generator(shuffled, output_signature=specs), batch_size=2)
    assert ["give it the same seed" in text for text in warned] == [True] * (RANK == 0)


def test_tensors_dicts_ragged_tensors_and_strings_are_sources() -> None:
    x, y = numbered(LENGTH)
    assert of_all(data.shard((tf.constant(x), y), batch_size=BATCH, shuffle=False)) == IN_ORDER
    words = np.array([f"é{i}" for i in x])
    tree = {"words": words, "objects": words.astype(object)}
    for step, (row, target) in enumerate(data.shard((tree, y), batch_size=BATCH, shuffle=False)):
        expected = [f"é{-i}" for i in target.numpy()]
        assert expected[0] == f"é{IN_ORDER[step][RANK]}"
        assert [word.decode() for word in row["words"].numpy()] == expected
        assert [word.decode() for word in row["objects"].numpy()] == expected
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(x.sum()), x)
    seen = []
    for rows, target in data.shard((ragged, y), batch_size=BATCH):
        assert rows.to_list() == tf.gather(ragged, -target).to_list()
        seen += (-target).numpy().tolist()
    of_doubles = data.shard((tf.cast(ragged, tf.float64), y / 2.0), batch_size=BATCH)
    assert [spec.dtype for spec in of_doubles.element_spec] == [tf.float32] * 2
    everyone = agree.gather_json("ragged", seen)
    assert sorted(row for of_rank in everyone for row in of_rank) == list(range(LENGTH))
    uneven_rows = np.array([[1], [2, 3]], dtype=object)
    assert "tf.ragged.constant(x)" in error_of(data.shard, uneven_rows, batch_size=1)
    assert "np.asarray(x)" in error_of(data.shard, ([1, 2], [3, 4]), batch_size=1)


def test_sparse_matrices_are_sources() -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    x = np.arange(24.0).reshape(8, 3) % 5 % 3
    entries = np.nonzero(x)
    order = np.random.default_rng(1).permutation(len(entries[0]))  # the same on all ranks
    row, column = (indices[order] for indices in entries)
    matrix = sparse.coo_matrix((x[row, column], (row, column)), x.shape)
    for source in (matrix, matrix.tocsc()):
        seen = []
        for rows, numbers in data.shard((source, np.arange(8)), batch_size=2):
            assert isinstance(rows, tf.SparseTensor)
            assert rows.dtype == tf.float32
            np.testing.assert_array_equal(tf.sparse.to_dense(rows), x[numbers])
            seen += numbers.numpy().tolist()
        everyone = [n for theirs in agree.gather_json("sparse", seen) for n in theirs]
        np.testing.assert_array_equal(matrix.row, row)
        assert len({*everyone}) == len(everyone) == 8 // (2 * SIZE) * 2 * SIZE


def test_data_frames_are_sources() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = numbered(LENGTH)
    frame = pandas.DataFrame({"a": x, "b": 2 * x})
    dataset = data.shard((frame, pandas.Series(y)), batch_size=BATCH, shuffle=False)
    assert of_all(dataset.map(lambda x, y: (x[:, 0], y))) == IN_ORDER
    assert dataset.element_spec[1].shape[1:] == (1,)  # as fit makes it of a Series
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-6)), "huber")
    model.fit(dataset, validation_data=dataset, verbose=0)
    assert model.evaluate(frame, pandas.Series(y), verbose=0) > 0  # traced for the same ranks
    mixed = pandas.DataFrame({"a": x, "b": [str(i) for i in x]})
    assert "astype('float32')" in error_of(data.shard, (mixed, y), batch_size=BATCH)


def test_custom_train_step_sees_the_structure_that_the_script_gave() -> None:
    class Own(training.OwnStep):
        def train_step(self, batch):
            seen.append(len(batch))
            return super().train_step(batch)

    x, y, _ = samples(TOGETHER + SIZE + 1)
    for source in (x, y), tf.data.Dataset.from_tensor_slices((x, y)):
        seen: list[int] = []
        model = Own([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(momentum()), "mse")
        model.fit(data.shard(source, batch_size=BATCH), verbose=0)
        assert set(seen) == {2}
    ones = tf.data.Dataset.from_tensor_slices((x,))
    spec = data.shard(ones, batch_size=BATCH).element_spec
    assert isinstance(spec, tuple)


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
    assert "hvd.data.shard: rank 1: batch_size=None" in text

    class Broken(Batches):
        def __getitem__(self, index: int):
            if RANK == 0:
                raise OSError("no such file")
            return super().__getitem__(index)

    with pytest.raises(OSError, match=r"hvd\.data\.shard: rank 0: no such file"):
        data.shard(Broken(*numbered(5)))


@several
@pytest.mark.parametrize("kind", KINDS)
def test_sources_that_differ_are_refused_on_all_ranks(kind: str) -> None:
    text = error_of(shard, kind, *numbered(9 + RANK))
    assert "the ranks have different numbers of rows: rank 0: 9; rank 1: 10" in text
    other_dtype = np.ones(9, "int32" if RANK == 1 else "float32")
    text = error_of(shard, kind, other_dtype, other_dtype)
    assert re.search(r"shapes or dtypes of rows: rank 0: \(float32\(.*; rank 1: \(int32\(", text)
    other_shape = np.ones((9, 2 + RANK))
    text = error_of(shard, kind, other_shape, other_shape)
    assert "(None, 3)" in text if kind == "whole batches" else "(3,)" in text
    text = error_of(shard, kind, *numbered(9), seed=RANK)
    assert re.search("different arguments: rank 0: [^;]* seed=0, [^;]*; rank 1: .* seed=1, ", text)
    assert "Give every rank the same arguments" in text
    same_length = Batches(*numbered(24), size=2 + RANK)
    assert "rows per batch: rank 0: 2; rank 1: 3" in error_of(data.shard, same_length)
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
    for wrong in [], "3", 3.5, float("inf"):
        text = error_of(data.agree_on_steps, wrong if last else 5)
        assert f"got {wrong!r}, expected a number" in text
    assert "expected 'trim'" in error_of(data.agree_on_steps, 5, uneven="pad")
    if SIZE > 1:
        text = error_of(data.agree_on_steps, 5 + RANK, uneven="error")
        assert "rank 0: 5; rank 1: 6" in text
