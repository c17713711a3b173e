"""Sums and averages of ``tf.IndexedSlices``, such as the gradients of embeddings."""

import tensorflow as tf

from hvd_keras.compression import Compressor
from hvd_keras.ops import validate
from hvd_keras.ops.reduce_op import Average, ReduceOp
from hvd_keras.process_sets import ProcessSet


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
    """Gathers the rows of all ranks and scales them, without adding those of one index.

    Rows that occur twice stay two: Keras's adaptive optimizers square each by itself, so that
    summing them first would not give what one process gets.

    Args:
        slices: of this rank; any number of rows in each.
        compression: how the values are sent.
        reduction: ``Average`` or ``Sum``.
        factor: multiplies the values, besides the division of an average.
        name: of the allreduce.
        process_set: the ranks that take part.
    """
    scale = factor / process_set.size() if reduction is Average else factor
    parts, contexts = [], []
    for one in slices:
        values, context = compression.compress(one.values)
        parts += [values, one.indices]
        contexts.append(context)
    gathered = validate.raw.hvd_allgather(
        parts,
        note=f"{reduction.value} factor={scale!r}",
        tensor_name=name_of_slices(name),
        process_set=process_set.id(),
    )
    results = []
    for i, one in enumerate(slices):
        values = compression.decompress(gathered[2 * i], contexts[i])
        if scale != 1.0:
            values *= tf.constant(scale, values.dtype)
        results.append(tf.IndexedSlices(values, gathered[2 * i + 1], one.dense_shape))
    return results
