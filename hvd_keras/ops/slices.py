"""Sums and averages of ``tf.IndexedSlices``, such as the gradients of embeddings."""

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.ops.compression import Compression, Compressor
from hvd_keras.ops.reduce_op import Average, ReduceOp
from hvd_keras.process_sets import ProcessSet

# So many of its indices each rank sends a second time, to be compared with those of other ranks.
_COMPARED = 8


def name_of_slices(name: str) -> str:
    """The name under which the slices of an allreduce are gathered."""
    return f"{name}.slices"


def reduce_slices(
    slices: list[tf.IndexedSlices],
    compression: type[Compressor],
    reduction: ReduceOp,
    factor: float,
    name: str,
    process_set: ProcessSet,
) -> list[tf.IndexedSlices]:
    """Gathers the rows of all ranks and scales them.

    Rows that occur twice are not summed, unless all ranks have looked up the same rows: Keras's
    adaptive optimizers square each row separately, so the result needs the rows of one process.

    Args:
        slices: this rank's slices, each with any number of rows.
        compression: how the values are sent.
        reduction: ``Average`` or ``Sum``.
        factor: multiplies the values, in addition to the division of an average.
        name: the name of the allreduce.
        process_set: the ranks that take part.
    """
    scale = factor / process_set.size() if reduction is Average else factor

    def scaled(values: tf.Tensor) -> tf.Tensor:
        return values if scale == 1.0 else values * tf.constant(scale, values.dtype)

    parts, contexts = [], []
    for one in slices:
        # One's own rows are fewer than all, but a compressed value may be too small to be divided.
        own = scaled(one.values) if compression is Compression.none else one.values
        values, context = compression.compress(own)
        parts += [values, one.indices, _summary(one.indices)]
        contexts.append(context)
    gathered = validate.raw.hvd_allgather(
        parts,
        note=f"{reduction.value} factor={scale!r}",
        tensor_name=name_of_slices(name),
        process_set=process_set.id(),
    )
    results = []
    for i, one in enumerate(slices):
        values, indices, summaries = gathered[3 * i : 3 * i + 3]
        values = compression.decompress(values, contexts[i])
        if compression is not Compression.none:
            values = scaled(values)
        if process_set.size() > 1:
            values, indices = _sum_equal_lookups(values, indices, summaries)
        results.append(tf.IndexedSlices(values, indices, one.dense_shape))
    return results


def _summary(indices: tf.Tensor) -> tf.Tensor:
    """The number of rows of this rank and its first indices, -1 for those that it lacks.

    Args:
        indices: ``[rows]``, of any integer dtype.

    Returns:
        int64 ``[1, 1 + _COMPARED]``.
    """
    first = tf.cast(indices[:_COMPARED], tf.int64)
    padded = tf.concat([first, tf.fill([_COMPARED], tf.constant(-1, tf.int64))], 0)[:_COMPARED]
    return tf.concat([tf.shape(indices, tf.int64), padded], 0)[tf.newaxis]


def _sum_equal_lookups(
    values: tf.Tensor, indices: tf.Tensor, summaries: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the ranks' rows if all ranks have looked up the same, as embeddings of positions do.

    Such a lookup does not depend on the batch, so one process has each row once, with the sum.
    Ranks with shorter sequences have looked up only the first of the others' indices.

    Args:
        values: ``[sum of rows, ...]``, in the order of the ranks.
        indices: ``[sum of rows]``.
        summaries: int64 ``[ranks, ...]``, the ``_summary`` of each rank.

    Returns:
        Values and indices of the same shapes; rows that are no longer needed are 0.
    """
    rows, heads = summaries[:, 0], summaries[:, 1:]
    # In most steps these differ already. Comparing all rows of all ranks would take long.
    may_be_same = tf.reduce_all((heads < 0) | tf.equal(heads, tf.reduce_max(heads, 0)))

    def compared() -> tuple[tf.Tensor, tf.Tensor]:
        number = tf.range(tf.size(indices, tf.int64))
        ends = tf.cumsum(rows)
        rank = tf.searchsorted(ends, number, side="right", out_type=tf.int64)
        place = number - tf.gather(ends - rows, rank)  # of a row among its rank's rows
        longest = tf.argmax(rows)
        first = tf.gather(ends - rows, longest)
        same = tf.reduce_all(tf.equal(indices, tf.gather(indices, first + place)))
        # A single row may be the same by chance if each rank has one example.
        same = tf.logical_and(same, tf.gather(rows, longest) > 1)

        def summed() -> tuple[tf.Tensor, tf.Tensor]:
            needed = number < tf.gather(rows, longest)
            whole = tf.gather(indices, first + tf.where(needed, number, tf.zeros_like(number)))
            return tf.math.unsorted_segment_sum(values, place, tf.size(indices)), whole

        both: tuple[tf.Tensor, tf.Tensor] = tf.cond(same, summed, lambda: (values, indices))
        return both

    chosen: tuple[tf.Tensor, tf.Tensor] = tf.cond(may_be_same, compared, lambda: (values, indices))
    return chosen
