"""Gradients of the collectives, against finite differences over all ranks' inputs.

A rank's gradient must be the slope, along its own input, of the sum of all ranks' losses. The
optimizer divides by the number of ranks (docs/design.md, "Gradients of the collectives").
"""

import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2, 3)


def point(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    index = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return np.cos(1.0 + index + 1.7 * rank) + 0.3 * rank


def weights(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.sin(2.0 + np.arange(np.prod(shape, dtype=int)).reshape(shape) * (rank + 1))


def check(collective, alone, points, *, compiled: bool) -> None:
    """Compares gradients. ``alone`` computes the result of ``collective`` from all ranks' inputs,
    the same for all ranks or a list by rank."""
    mine = tf.Variable(points[RANK])

    def of_each(inputs):
        outputs = alone(inputs)
        return outputs if isinstance(outputs, list) else [outputs] * SIZE

    def gradient():
        with tf.GradientTape() as tape:
            y = collective(mine)
            loss = tf.reduce_sum(y * tf.constant(weights(RANK, of_each(points)[RANK].shape)))
        return tape.gradient(loss, mine)

    got = (tf.function(gradient, autograph=False) if compiled else gradient)()

    def total_loss(inputs):
        return sum(np.sum(y * weights(r, y.shape)) for r, y in enumerate(of_each(inputs)))

    step = 1e-6
    expected = np.zeros_like(points[RANK])
    for i in np.ndindex(expected.shape):
        up, down = [p.copy() for p in points], [p.copy() for p in points]
        up[RANK][i] += step
        down[RANK][i] -= step
        expected[i] = (total_loss(up) - total_loss(down)) / (2 * step)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


REDUCE = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}
SCALES = {"prescale_factor": 0.5, "postscale_factor": 3.0}
SPLITS = [[1 + (r + to) % 2 for to in range(SIZE)] for r in range(SIZE)]


def exchanged(inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What alltoall gives each rank."""
    parts = [np.split(x, np.cumsum(SPLITS[r])[:-1]) for r, x in enumerate(inputs)]
    return [np.concatenate([parts[r][to] for r in range(SIZE)]) for to in range(SIZE)]


# A collective, what it gives of all ranks' inputs, and a rank's shape of an input.
COLLECTIVES = {
    **{
        f"allreduce, {op}": (
            lambda x, op=op: hvd.allreduce(x, op=getattr(hvd, op), name=f"g {op}", **SCALES),
            lambda inputs, of=of: of(0.5 * np.stack(inputs), axis=0) * 3.0,
            lambda rank: (2, 3),
        )
        for op, of in REDUCE.items()
    },
    **{
        f"reducescatter, {op}": (
            lambda x, op=op: hvd.reducescatter(x, op=getattr(hvd, op), name=f"g {op}", **SCALES),
            lambda inputs, op=op: np.array_split(REDUCE[op](1.5 * np.stack(inputs), 0), SIZE),
            lambda rank: (2 * SIZE + 1, 2),  # rows do not divide by the ranks
        )
        for op in ("Average", "Sum")
    },
    "allgather": (lambda x: hvd.allgather(x, name="g"), np.concatenate, lambda rank: (rank + 1, 2)),
    "broadcast": (
        lambda x: hvd.broadcast(x, SIZE - 1, name="g"),
        lambda inputs: inputs[-1],
        lambda rank: (3,),
    ),
    "alltoall": (
        lambda x: hvd.alltoall(x, SPLITS[RANK], name="g")[0],
        exchanged,
        lambda rank: (sum(SPLITS[rank]), 2),
    ),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_slopes(name: str, compiled: bool) -> None:
    collective, alone, shape = COLLECTIVES[name]
    check(collective, alone, [point(r, shape(r)) for r in range(SIZE)], compiled=compiled)


@pytest.mark.parametrize("op", REDUCE)
def test_compressed_allreduce(op: str) -> None:
    # float16 represents these values and gradients exactly, so compression does not change them.
    values = [np.array([1.5, -2.0, 3.0 + r, 0.25 * (-1) ** r]) for r in range(SIZE)]

    def gradient(compression) -> np.ndarray:
        x = tf.Variable(values[RANK] + (1e-5 if compression is hvd.Compression.fp16 else 0.0))
        with tf.GradientTape() as tape:
            y = hvd.allreduce(x, op=getattr(hvd, op), compression=compression)
            loss = tf.reduce_sum(y * [1.0, 2.0, 0.5, -1.0])
        return tape.gradient(loss, x).numpy()

    got = gradient(hvd.Compression.fp16)
    np.testing.assert_allclose(got, gradient(hvd.Compression.none), rtol=2**-10)
    assert got.any()


def test_product_with_zeros() -> None:
    points = [point(r, (4,)) for r in range(SIZE)]
    points[0][1] = 0.0  # one rank's factor is 0
    for p in points:
        p[2] = 0.0  # all ranks' are
    check(
        lambda x: hvd.allreduce(x, op=hvd.Product),
        lambda inputs: np.prod(np.stack(inputs), axis=0),
        points,
        compiled=False,
    )


def test_ties_for_the_maximum_share_its_gradient() -> None:
    x = tf.Variable([1.0, float(RANK)])
    with tf.GradientTape() as tape:
        y = hvd.allreduce(x, op=hvd.Max)
    # y occurs once in every rank's loss, so the total upstream gradient is SIZE.
    np.testing.assert_allclose(tape.gradient(y, x), [1.0, SIZE if RANK == SIZE - 1 else 0.0])


def contrastive(rows, columns, first: int) -> tf.Tensor:
    """A contrastive loss: the mean over the rows of finding each row's own column."""
    own = first + tf.range(tf.shape(rows)[0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            own, tf.matmul(rows, columns, transpose_b=True)
        )
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["own rows", "all rows", "own rows, scattered", "from the root"])
def test_ranks_that_use_each_others_rows_train_as_one_process(way: str, compiled: bool) -> None:
    """Averaged over the ranks, gradients are those of one process with the whole batch."""
    per_rank = 3
    x = np.concatenate([point(r, (per_rank, 4)) for r in range(SIZE)])
    start = point(11, (4, 5))
    mine = slice(per_rank * RANK, per_rank * (RANK + 1))

    def of_one_process() -> tf.Tensor:
        w = tf.Variable(start)
        with tf.GradientTape() as tape:
            z = tf.tanh(tf.constant(x) @ w)
            columns = tf.tile(z[:per_rank], [SIZE, 1]) if way == "from the root" else z
            loss = contrastive(z, columns, 0)
        return tape.gradient(loss, w)

    w = tf.Variable(start)

    def of_all_ranks() -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            z = tf.tanh(tf.constant(x[mine]) @ w)
            first = per_rank * RANK
            if way == "own rows":
                loss = contrastive(z, hvd.allgather(z), first)
            elif way == "all rows":
                everyone = hvd.allgather(z)
                loss = contrastive(everyone, everyone, 0)
            elif way == "own rows, scattered":
                everyone = hvd.allgather(z)
                own = hvd.reducescatter(
                    tf.pad(z, [[first, x.shape[0] - first - per_rank], [0, 0]]), op=hvd.Sum
                )
                loss = contrastive(own, everyone, first)
            else:
                columns = tf.tile(hvd.broadcast(z, 0), [SIZE, 1])
                loss = contrastive(z, columns, first)
        return tape.gradient(loss, w)

    got = (tf.function(of_all_ranks, autograph=False) if compiled else of_all_ranks)()
    np.testing.assert_allclose(got, of_one_process(), rtol=1e-10)


def test_two_ways_to_write_a_sum_have_one_gradient() -> None:
    x = tf.Variable(point(RANK, (3,)))
    with tf.GradientTape(persistent=True) as tape:
        reduced = hvd.allreduce(x, op=hvd.Sum, name="s1") ** 2 * (RANK + 1)
        gathered = tf.reduce_sum(hvd.allgather(x[tf.newaxis], name="s2"), 0) ** 2 * (RANK + 1)
    np.testing.assert_allclose(tape.gradient(gathered, x), tape.gradient(reduced, x))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_no_floating_point_has_none(compiled: bool) -> None:
    """Indices of slices, and tensors of other dtypes in the same request."""
    x, number = tf.Variable(point(RANK, (3, 1))), tf.constant([RANK + 1])

    def gradients():
        results = []
        for collective in (
            lambda: hvd.allreduce(tf.IndexedSlices(x * 1.0, tf.range(3) + RANK)).values,
            lambda: hvd.grouped_allgather([number, x])[1],
            lambda: hvd.grouped_allreduce([number > 1, x], op=hvd.Max)[1],
            lambda: hvd.grouped_allreduce([number, x], op=hvd.Product)[1],
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(collective() * 2.0)
            results.append(tf.convert_to_tensor(tape.gradient(loss, x)))
        return results

    slices, gathered, largest, product = tf.function(gradients)() if compiled else gradients()
    every = np.stack([point(rank, (3, 1)) for rank in range(SIZE)])
    np.testing.assert_allclose(slices, np.full((3, 1), 2.0))
    np.testing.assert_allclose(gathered, np.full((3, 1), 2.0 * SIZE))
    np.testing.assert_allclose(largest, 2.0 * SIZE * (every[RANK] == every.max(0)))
    np.testing.assert_allclose(product, 2.0 * SIZE * every.prod(0) / every[RANK])


def test_adasum_has_none_and_says_so() -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = hvd.allreduce(x, op=hvd.Adasum)
    with pytest.raises(Exception, match="Adasum has no gradient"):
        tape.gradient(y, x)
