"""Collectives that send different rows, or none, to different ranks; and join."""

import gc
import pathlib
import time
import traceback
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float64"])
def test_alltoall_in_equal_parts(dtype: str) -> None:
    mine = tf.cast(10 * RANK + np.arange(2 * SIZE), dtype)
    expected = tf.cast(
        np.concatenate([10 * r + np.arange(2 * RANK, 2 * RANK + 2) for r in range(SIZE)]), dtype
    )
    np.testing.assert_array_equal(hvd.alltoall(mine), expected)


def test_adasum() -> None:
    # Orthogonal: their sum. Parallel: their mean.
    orthogonal = np.eye(4, dtype="float32")[RANK % 4] * (RANK + 1)
    np.testing.assert_allclose(
        hvd.allreduce(orthogonal, op=hvd.Adasum),
        sum(np.eye(4)[r % 4] * (r + 1) for r in range(SIZE)),
        rtol=1e-6,
    )
    parallel = np.array([3.0, -4.0], "float64")
    np.testing.assert_allclose(hvd.allreduce(parallel, op=hvd.Adasum), parallel)
    with pytest.raises(ValueError, match=r"op=hvd\.Adasum"):
        hvd.allreduce(tf.constant([1]), op=hvd.Adasum)


def test_adasum_in_an_optimizer() -> None:
    variable = keras.Variable(np.zeros(4, "float32"))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=hvd.Adasum, sparse_as_dense=True
    )
    optimizer.apply([tf.constant(np.eye(4, dtype="float32")[RANK % 4])], [variable])
    np.testing.assert_allclose(variable, -sum(np.eye(4)[r % 4] for r in range(SIZE)))
    if SIZE > 1:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
        slices = tf.IndexedSlices(tf.ones(1), tf.constant([RANK % 4]), tf.constant([4]))
        with pytest.raises(ValueError, match="sparse_as_dense=True"):  # on all ranks
            optimizer.apply([slices if RANK == 0 else None], [keras.Variable(np.zeros(4))])


def test_reducescatter_takes_sums_and_averages_only() -> None:
    with pytest.raises(NotImplementedError, match=r"expected hvd\.Average or hvd\.Sum"):
        hvd.reducescatter(tf.zeros(SIZE), op=hvd.Max)
    with pytest.raises(ValueError, match="scalar"):
        hvd.reducescatter(tf.constant(1.0))


@pytest.mark.parametrize("call", [hvd.barrier, tf.function(hvd.barrier)])
def test_barrier_waits_for_all(call, directory: pathlib.Path) -> None:
    """A rank that passes sees what the last rank did before, however late that was."""
    sign = directory / "the last rank has come"
    if RANK == SIZE - 1:
        time.sleep(0.3)
        sign.touch()
    call()
    assert sign.exists()


def test_join() -> None:
    # Rank r has r + 1 batches.
    for batch in range(RANK + 1):
        total = hvd.allreduce(tf.constant([1.0, batch]), op=hvd.Sum)
        rest = SIZE - batch
        np.testing.assert_array_equal(total, [rest, rest * batch])
        mine = tf.constant([float(RANK)])
        with tf.GradientTape() as tape:
            tape.watch(mine)
            rows = hvd.allgather(mine)
            loss = tf.reduce_sum(rows * rows)
        np.testing.assert_array_equal(rows, range(batch, SIZE))
        np.testing.assert_array_equal(tape.gradient(loss, mine), 2.0 * rest * mine)
        slices = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([RANK]), tf.constant([SIZE, 1]))
        sparse = hvd.allreduce(slices, op=hvd.Sum)
        np.testing.assert_array_equal(sparse.indices, range(batch, SIZE))
    assert hvd.join() == SIZE - 1
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE


def test_place_as_tensors() -> None:
    @tf.function
    def place():
        return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()

    assert [int(x) for x in place()] == [RANK, SIZE, hvd.local_rank(), hvd.local_size()]
    assert int(hvd.process_set_included_op()) == 1
    with pytest.raises(tf.errors.FailedPreconditionError, match="no process set 77"):
        hvd.size_op(77)


def test_groups_of_several_chunks_do_not_overtake_each_other() -> None:
    """A rank that is late with one dtype still reads what the others overwrite for the next."""
    dtypes = (tf.uint32, tf.float64, tf.int32, tf.float32, tf.int64)
    total = SIZE * (SIZE + 1) // 2
    for repeat in range(10):
        shape = [400_000 + 1000 * repeat]
        mine = [tf.fill(shape, tf.cast((RANK + 1) * (i + 1), d)) for i, d in enumerate(dtypes)]
        sums = hvd.grouped_allreduce(mine, op=hvd.Sum, name=f"dtypes {repeat}")
        for i, (values, dtype) in enumerate(zip(sums, dtypes, strict=True)):
            np.testing.assert_array_equal(values, np.full(shape, total * (i + 1), dtype.name))


def test_a_request_that_is_dropped_keeps_its_memory() -> None:
    """As if an error came between a request and its results."""
    tensor = np.ones(4)
    memory = [agree.Memory.at(tensor.ctypes.data, "float64", (4,))]
    agree.Request("allreduce", memory, [tensor.ctypes.data], tensor, name="dropped")
    kept = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert kept() is not None
    hvd.barrier()
    np.testing.assert_array_equal(kept(), np.full(4, SIZE))


def test_autograph_converts_of_a_collective_only_a_compressor_of_the_users(caplog) -> None:
    class Halves(hvd.Compressor):
        @staticmethod
        def compress(tensor):
            if tf.reduce_max(tensor) > 0:  # of a tensor: TensorFlow refuses it unless converted
                tensor /= 2
            called.extend(frame.name for frame in traceback.extract_stack())
            return tensor, None

        @staticmethod
        def decompress(tensor, context):
            return tensor * 2

    called: list[str] = []
    reduce = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=Halves))
    np.testing.assert_array_equal(reduce(tf.ones(2)), [SIZE, SIZE])
    assert "grouped_allreduce" in called
    assert "tf__grouped_allreduce" not in called
    caplog.clear()
    assert tf.function(lambda x: x / hvd.size())(tf.ones([])) == 1 / SIZE
    assert not caplog.text  # of what cannot be transformed
