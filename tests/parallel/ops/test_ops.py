"""What random collectives (test_fuzz.py) do not try, compared with values computed locally."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import inputs

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.mark.parametrize("op", ["Min", "Max"])
def test_allreduce_of_bools(op: str) -> None:
    everyone = inputs.of_all_ranks(SIZE, (20,)) % 2 == 0
    combine = {"Min": np.all, "Max": np.any}[op]
    result = hvd.allreduce(tf.constant(everyone[RANK]), op=getattr(hvd, op))
    np.testing.assert_array_equal(result.numpy(), combine(everyone, axis=0))


def test_sums_of_many_bytes_leave_their_inputs_as_they_are() -> None:
    """36 MB: more than the caches, which are not used to write so much."""
    shapes = [(33,), (9_000_001,), (), (1001, 7)]
    mine = [tf.constant(inputs.tensor(RANK, shape)) for shape in shapes]
    sums = hvd.grouped_allreduce(mine, op=hvd.Sum)
    for shape, tensor, result in zip(shapes, mine, sums, strict=True):
        np.testing.assert_array_equal(tensor, inputs.tensor(RANK, shape))
        np.testing.assert_array_equal(result, inputs.of_all_ranks(SIZE, shape).sum(0))


def test_half_precision_is_accumulated_in_float32() -> None:
    # In float16, 2048 + 1 is 2048, so a sum rounded at each step would lose the ones.
    mine = tf.constant([2048.0 if RANK == 0 else 1.0], tf.float16)
    total = hvd.allreduce(mine, op=hvd.Sum)
    np.testing.assert_array_equal(total, np.array([2048.0 + (SIZE - 1)], np.float16))


def test_all_ranks_hold_the_same_bits() -> None:
    mine = tf.random.stateless_normal((10_001,), seed=(RANK, 1))
    result = hvd.allreduce(mine)
    everyone = hvd.allgather(result[tf.newaxis]).numpy()
    assert all((row == everyone[0]).all() for row in everyone)
    terms = [tf.random.stateless_normal((10_001,), seed=(r, 1)).numpy() for r in range(SIZE)]
    np.testing.assert_allclose(result, np.mean(terms, axis=0), rtol=1e-5, atol=1e-6)


def test_numbers_and_lists_may_be_of_any_kind() -> None:
    """Such as NumPy's, other ones on each rank, and generators."""
    mine = [tf.constant([float(RANK + i)]) for i in range(3)]
    for several in (
        hvd.grouped_allreduce(iter(mine), op=hvd.Max),
        tf.function(lambda: hvd.grouped_allreduce((x for x in mine), op=hvd.Max))(),
        hvd.grouped_allgather(iter(mine)),
    ):
        assert [float(tf.reduce_max(one)) for one in several] == [SIZE - 1.0 + i for i in range(3)]
    factor = 2 if RANK == 0 else np.float64(2.0)
    assert hvd.allreduce(mine[0], op=hvd.Max, prescale_factor=factor) == 2.0 * (SIZE - 1)
    assert hvd.broadcast(mine[0], np.int64(SIZE - 1)) == SIZE - 1.0
    with pytest.raises(Exception, match="splits are float32, expected integers"):
        hvd.alltoall(tf.ones(SIZE), splits=[1.0] * SIZE)


@pytest.mark.parametrize("op", ["Average", "Sum", "Max", "Product"])
def test_scale_factors(op: str) -> None:
    combine = {"Average": np.mean, "Sum": np.sum, "Max": np.max, "Product": np.prod}[op]
    result = hvd.allreduce(
        tf.constant(inputs.tensor(RANK, (9,), "float64")),
        op=getattr(hvd, op),
        prescale_factor=0.1,
        postscale_factor=3.0,
    )
    everyone = inputs.of_all_ranks(SIZE, (9,), "float64") * 0.1
    np.testing.assert_allclose(result, combine(everyone, axis=0) * 3.0, rtol=1e-14)


def test_horovods_average_argument() -> None:
    total = inputs.of_all_ranks(SIZE, (3,)).sum(0)
    mine = tf.constant(inputs.tensor(RANK, (3,)))
    np.testing.assert_array_equal(hvd.allreduce(mine, average=False), total)
    np.testing.assert_allclose(hvd.allreduce(mine, average=True), total / SIZE, rtol=1e-6)


def test_grouped_allreduce_of_mixed_dtypes_and_slices_in_any_order() -> None:
    slices = tf.IndexedSlices(
        tf.constant(inputs.tensor(RANK, (RANK + 1, 2))), tf.range(RANK + 1), tf.constant([10, 2])
    )
    tensors = [
        tf.constant(inputs.tensor(RANK, (3,))),
        slices,
        tf.constant(inputs.tensor(RANK, (4, 2), "int32")),
        tf.constant(inputs.tensor(RANK, (), "float64")),
    ]
    a, b, c, d = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    np.testing.assert_array_equal(a, inputs.of_all_ranks(SIZE, (3,)).sum(0))
    np.testing.assert_array_equal(c, inputs.of_all_ranks(SIZE, (4, 2), "int32").sum(0))
    np.testing.assert_array_equal(d, inputs.of_all_ranks(SIZE, (), "float64").sum(0))
    expected = np.zeros((10, 2))
    for r in range(SIZE):
        expected[: r + 1] += inputs.tensor(r, (r + 1, 2))
    np.testing.assert_array_equal(tf.convert_to_tensor(b), expected)
    assert b.dense_shape.numpy().tolist() == [10, 2]


@pytest.mark.parametrize(
    ("lengths", "compiled"),
    [("equal", False), ("equal", True), ("growing", False)],  # XLA knows only equal shapes
)
def test_what_all_ranks_look_up_is_summed(lengths: str, compiled: bool) -> None:
    """As one process has it, whose adaptive optimizers square each row by itself."""
    rows = 3 if lengths == "equal" else 2 + RANK

    @tf.function(jit_compile=compiled)
    def reduced() -> tf.IndexedSlices:
        values = tf.ones((rows, 2)) * tf.range(1.0, rows + 1)[:, None] * (RANK + 1)
        slices = tf.IndexedSlices(values, tf.range(rows) * 2, tf.constant([12, 2]))
        return hvd.allreduce(slices, op=hvd.Sum, name=f"lookup {lengths} {compiled}")

    result = reduced()
    square = tf.IndexedSlices(tf.square(result.values), result.indices, result.dense_shape)
    expected = np.zeros((12, 2))
    for r in range(SIZE):
        for row in range(3 if lengths == "equal" else 2 + r):
            expected[2 * row] += (row + 1) * (r + 1)
    np.testing.assert_array_equal(tf.convert_to_tensor(result), expected)
    np.testing.assert_array_equal(tf.convert_to_tensor(square), expected**2)


@pytest.mark.parametrize("equal", [0, 1, 7, 8, 9, 19])
def test_lookups_with_common_prefixes_stay_separate(equal: int) -> None:
    own = np.concatenate([np.arange(equal), np.arange(equal, 20) + 100 * (RANK + 1)])
    slices = tf.IndexedSlices(tf.fill([20, 1], RANK + 1.0), tf.constant(own), [1000, 1])
    result = hvd.allreduce(slices, op=hvd.Sum)
    np.testing.assert_array_equal(result.values[:, 0], np.repeat(np.arange(SIZE) + 1, 20))


def test_lookups_of_some_ranks_may_be_empty() -> None:
    rows = [2 * (r % 2) for r in range(SIZE)]
    slices = tf.IndexedSlices(
        tf.fill([rows[RANK], 1], RANK + 1.0), tf.range(rows[RANK]) + RANK, tf.constant([9, 1])
    )
    result = tf.convert_to_tensor(hvd.allreduce(slices)).numpy()[:, 0]
    expected = np.zeros(9)
    for r in range(1, SIZE, 2):
        expected[r : r + 2] += (r + 1) / SIZE
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    none = tf.IndexedSlices(tf.ones((0, 1)), tf.zeros(0, tf.int64), tf.constant([9, 1]))
    assert hvd.allreduce(none).values.shape == (0, 1)


def test_unnamed_calls_match_although_one_rank_has_traced_more() -> None:
    @tf.function
    def step(x):
        return hvd.allreduce(x[:2], op=hvd.Sum) + hvd.allreduce(x[:2] * 10, op=hvd.Sum)

    if RANK == 0:
        for length in (3, 4, 5):
            step.get_concrete_function(tf.TensorSpec([length]))
    np.testing.assert_array_equal(step(tf.ones(6 + RANK)), [11 * SIZE, 11 * SIZE])


def test_named_requests_of_functions_from_several_threads_in_any_order() -> None:
    """TensorFlow has one inter-op thread here: a kernel that blocked it would hang the job."""
    count = 12
    results: dict[int, np.ndarray] = {}

    def run(i: int) -> None:
        call = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name=f"tensor {i}"))
        results[i] = call(tf.constant(inputs.tensor(RANK, (i + 1,)))).numpy()

    order = np.random.default_rng(RANK).permutation(count)
    threads = [threading.Thread(target=run, args=(int(i),)) for i in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(count):
        np.testing.assert_array_equal(results[i], inputs.of_all_ranks(SIZE, (i + 1,)).sum(0))


@pytest.mark.parametrize("compiled", [False, True])
def test_collectives_in_loops_and_branches(compiled: bool) -> None:
    def loop(x):
        for _ in tf.range(3):
            if tf.reduce_sum(x) < 1e30:
                x = hvd.allreduce(x, op=hvd.Sum) / float(SIZE)
        return x

    function = tf.function(loop) if compiled else loop
    result = function(tf.constant(inputs.tensor(RANK, (4,), "float64")))
    expected = inputs.of_all_ranks(SIZE, (4,), "float64").mean(0)
    np.testing.assert_allclose(result, expected, rtol=1e-12)
