"""Process sets."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import missing_calls
from hvd_keras.runtime import process_sets

RANK, SIZE = hvd.rank(), hvd.size()

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.skipif(SIZE == 1, reason="one rank has no others to leave out"),
]


@pytest.fixture
def others():
    """All ranks but rank 0."""
    process_set = hvd.add_process_set(range(1, SIZE))
    yield process_set
    assert hvd.remove_process_set(process_set)


def test_an_object_that_one_rank_cannot_serialise() -> None:
    mine = threading.Lock() if RANK == 0 else 1
    for call in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(tf.errors.FailedPreconditionError, match="cannot be serialised"):
            call(mine)
    assert hvd.allgather_object(RANK) == [*range(SIZE)]


def test_place(others) -> None:
    assert others.size() == SIZE - 1
    assert others.included() == (RANK != 0)
    assert others.ranks == list(range(1, SIZE))
    assert others.process_set_id > 0
    assert int(hvd.size_op(others.process_set_id)) == SIZE - 1
    assert int(hvd.process_set_included_op(others.process_set_id)) == int(RANK != 0)
    if RANK != 0:
        assert others.rank() == RANK - 1
    assert hvd.global_process_set.size() == SIZE
    assert hvd.global_process_set.rank() == RANK


def test_gradients(others) -> None:
    if RANK == 0:
        return
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        mean = hvd.allreduce(x, process_set=others, name="mean")
        root = hvd.broadcast(x, SIZE - 1, process_set=others, name="root")
        rows = hvd.allgather(x, process_set=others, name="rows") * float(RANK)
    np.testing.assert_allclose(tape.gradient(mean, x), [1.0, 1.0])
    last = SIZE - 1 if RANK == SIZE - 1 else 0
    np.testing.assert_allclose(tape.gradient(root, x), [last, last])
    total = sum(range(1, SIZE))
    np.testing.assert_allclose(tape.gradient(rows, x), [total, total])


def test_training_in_a_set(others) -> None:
    """Rank 0 trains one model alone, the others train another one together."""
    if RANK == 0:
        with pytest.raises(ValueError, match="rank 0 is not in process set"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=others)
    mine = others if RANK != 0 else None
    x = tf.Variable([float(RANK), 1.0], name="others" if RANK else "alone")
    table = tf.Variable(tf.ones((3, 1)), name="table")
    optimizer = keras.optimizers.SGD(1.0)
    if mine:
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=others)
        hvd.broadcast_variables([x], 1, process_set=others)
        np.testing.assert_array_equal(x, [1.0, 1.0])
    rows = tf.IndexedSlices(tf.constant([[float(RANK)]]), tf.constant([0]), tf.constant([3, 1]))
    optimizer.apply([tf.constant([float(RANK), 0.0]), rows], [x, table])
    mean = (SIZE / 2) if RANK else 0.0  # of 1 to SIZE - 1
    np.testing.assert_allclose(x, [(1.0 if RANK else 0.0) - mean, 1.0])
    np.testing.assert_allclose(table, [[1.0 - mean], [1.0], [1.0]])

    tape = tf.GradientTape()
    with tape:
        loss = tf.reduce_sum(x * float(RANK))
    if mine:
        gradient = hvd.DistributedGradientTape(tape, process_set=others).gradient(loss, x)
        np.testing.assert_allclose(gradient, [mean, mean])
        assert hvd.allgather_object(RANK, process_set=others) == others.ranks
        assert hvd.broadcast_object(RANK, SIZE - 1, process_set=others) == SIZE - 1


def test_models_that_differ_within_a_set_name_the_ranks_of_the_job() -> None:
    last = hvd.global_process_set if SIZE == 2 else hvd.add_process_set([0, SIZE - 1])
    if last.included():
        v = tf.Variable(tf.zeros(1 + RANK))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=last)
        with pytest.raises(ValueError, match=rf"rank 0 has .*\[1\], rank {SIZE - 1} has"):
            optimizer.apply([tf.zeros_like(v)], [v])


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_tape_of_a_set_is_none_of_all_ranks(in_graph: bool) -> None:
    own = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    weight, optimizer = tf.Variable([1.0]), hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    with tf.GradientTape() as tape:
        loss = weight * (RANK + 1.0)
    hvd.DistributedGradientTape(tape).gradient(loss, weight)  # not applied

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * (RANK + 1.0))
        tape = hvd.DistributedGradientTape(tape, process_set=own[RANK])
        optimizer.apply(tape.gradient(loss, [weight]), [weight])

    (tf.function(step) if in_graph else step)()
    np.testing.assert_allclose(weight, [1 - (SIZE + 1) / 2], rtol=1e-6)
    assert in_graph or not any(weight in one for one in missing_calls.of_distributed.values())


def test_a_set_goes_on_while_another_is_stuck(others) -> None:
    waits = threading.Thread(target=lambda: hvd.allreduce(1.0, name="of all"))
    if RANK != 0:
        waits.start()  # for rank 0, which comes last
        assert hvd.allreduce(1.0, op=hvd.Sum, process_set=others) == SIZE - 1
    hvd.barrier()
    if RANK == 0:
        waits.start()
    waits.join()


def test_sets_that_differ_are_refused_on_all_ranks() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)different process sets:.*rank 0: \[0\].*rank 1: \[0, 1\]"
    ):
        hvd.add_process_set([0] if RANK == 0 else [0, 1])
    with pytest.raises(ValueError, match="got ranks 0, 99, expected"):
        hvd.add_process_set([0, 99])
    with pytest.raises(ValueError, match=r"has the same ranks\. Use hvd\.global_process_set\."):
        hvd.add_process_set(range(SIZE))
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE


def test_a_list_twice_makes_one_set() -> None:
    last = [SIZE - 1]
    before = len(process_sets.added())
    hvd.init(process_sets=[last, last])
    (made,) = process_sets.added()[before:]
    hvd.remove_process_set(made)


def test_sets_come_and_go() -> None:
    first = hvd.add_process_set(hvd.ProcessSet([0]))
    second = hvd.add_process_set([SIZE - 1])
    assert first.process_set_id != second.process_set_id
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    with pytest.raises(ValueError, match="has not been added"):
        hvd.allreduce(1.0, process_set=first)
    again = hvd.add_process_set(first)
    if RANK == 0:
        assert hvd.allreduce(3.0, process_set=again) == 3.0
    assert hvd.remove_process_set(again)
    assert hvd.remove_process_set(second)
