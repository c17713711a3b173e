"""Sums and averages of ``tf.IndexedSlices``, such as the gradients of embeddings."""

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.ops.reduction import Compression, Compressor
from hvd_keras.runtime.keras import converted
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.runtime.reductions import Average, ReduceOp


def reduce_slices(
    slices: list[tf.IndexedSlices],
    compression: type[Compressor],
    reduction: ReduceOp,
    factor: float,
    name: str,
    process_set: ProcessSet,
) -> list[tf.IndexedSlices]:
    """Gather the rows of all ranks, any number of each, and scale them.

    Rows that occur twice are not summed, except those of lookups that do not depend on the batch,
    such as positions, or of each id once: Keras's adaptive optimizers square each row separately,
    so the result needs the rows of one process.

    Args:
        compression: how the values are sent.
        reduction: ``Average`` or ``Sum``.
        factor: multiplies the values, in addition to the division of an average.
        name: the name of the allreduce; that of the gathering ends with ``.slices``.
    """
    scale = factor / process_set.size() if reduction is Average else factor

    def scaled(values: tf.Tensor) -> tf.Tensor:
        return values if scale == 1.0 else values * tf.constant(scale, values.dtype)

    parts, contexts = [], []
    for one in slices:
        # One's own rows are fewer than all, but a compressed value may be too small to be divided.
        own = scaled(one.values) if compression is Compression.none else one.values
        values, context = converted(compression.compress)(own)
        # Three tensors of one request: [rows, ...], [rows] and [2].
        parts += [values, one.indices, _kind(one.indices)]
        contexts.append(context)
    gathered = validate.raw.hvd_allgather(
        parts,
        note=f"{reduction.value} factor={scale!r}",
        tensor_name=f"{name}.slices",
        process_set=process_set.id(),
    )
    results = []
    for i, one in enumerate(slices):
        values, indices, kinds = gathered[3 * i : 3 * i + 3]
        values = converted(compression.decompress)(values, contexts[i])
        if compression is not Compression.none:
            values = scaled(values)
        if process_set.size() > 1:
            values, indices = _sum_equal_lookups(values, indices, kinds)
        results.append(tf.IndexedSlices(values, indices, one.dense_shape))
    return results


# What is known of a rank's indices: nothing; that one process would look up each row once if those
# of other ranks are the same, or the first of them; that it would in any case.
_UNKNOWN, _IF_SAME, _COMMON = range(3)


def _kind(indices: tf.Tensor) -> tf.Tensor:
    """Whether one process would look up each row once, and how many there are, int64 ``[2]``."""
    size = tf.size(indices, out_type=tf.int64)
    are_unique = _are_unique(indices)
    kind = _COMMON if are_unique else _constness(indices)
    if are_unique or kind == _UNKNOWN:
        return tf.stack([tf.constant(kind, tf.int64), size])
    # A row that occurs twice belongs to several examples, such as a segment number of all tokens.
    # So may a single one, if there are as many as examples.
    ordered = tf.sort(indices)
    are_different = tf.reduce_all(ordered[1:] > ordered[:-1])
    is_one = not indices.shape.is_fully_defined() and tf.size(indices) < 2
    found = tf.logical_and(are_different, tf.logical_not(is_one))
    return tf.stack([tf.cast(found, tf.int64) * kind, size])


def _are_unique(indices: tf.Tensor) -> bool:
    """Whether they are the different ids of a batch, as ``tf.nn.embedding_lookup_sparse`` has."""
    if not tf.is_symbolic_tensor(indices):
        return False  # In eager execution nobody knows.
    while indices.op.type in ("Cast", "Identity", "Reshape"):
        indices = indices.op.inputs[0]
    number = {"Unique": 0, "UniqueV2": 0, "UniqueWithCounts": 0, "UniqueWithCountsV2": 0}
    number |= {f"SparseSegment{of}GradV2": 1 for of in ("Mean", "SqrtN", "Sum")}
    return bool(number.get(indices.op.type) == indices.value_index)


def _constness(tensor: tf.Tensor) -> int:
    """Whether a tensor of a graph is computed from constants and shapes alone, not from data.

    Arrays, tensors from outside of a function, and integers in variables may be positions or data.
    """
    if not tf.is_symbolic_tensor(tensor):
        return _UNKNOWN
    kind, seen, found = _COMMON, set(), [tensor]
    while found:
        one = found.pop()
        op = one.op
        captured = []
        if op.type == "Placeholder":
            of_function = getattr(op.graph, "captures", ())
            captured = [outer for outer, inner in of_function if inner is one]
        if captured or (op.type == "ReadVariableOp" and one.dtype.is_integer):
            kind = _IF_SAME
            found += filter(tf.is_symbolic_tensor, captured)
            continue
        if op.op_def.is_stateful or (not op.inputs and op.type != "Const"):
            return _UNKNOWN
        if op.type == "Const" and one.shape.rank != 0 and one.shape.num_elements() != 1:
            kind = _IF_SAME
        if (op.graph, op.name) not in seen and op.type not in ("Shape", "ShapeN", "Size"):
            found += op.inputs
        seen.add((op.graph, op.name))
    return kind


def _sum_equal_lookups(
    values: tf.Tensor, indices: tf.Tensor, kinds: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum the ranks' rows if one process would look up each row once, as those of positions.

    One process has each of its rows once, with the sum. Ranks with shorter sequences have looked up
    only the first of the others' indices.

    ``values`` are ``[sum of rows, ...]``, in the order of the ranks, ``indices`` ``[sum of rows]``,
    ``kinds`` ``[2 * ranks]``. The results have the same shapes; rows no longer needed are 0.
    """

    def summed() -> tuple[tf.Tensor, tf.Tensor]:
        order = tf.argsort(indices, stable=True)  # equal ones stay in the order of the ranks
        ordered = tf.gather(indices, order)
        is_new = tf.not_equal(ordered[1:], ordered[:-1])  # != is no op in TensorFlow 1
        is_new = tf.concat([[0], tf.cast(is_new, tf.int64)], 0)
        place, size = tf.cumsum(is_new), tf.size(indices)
        rows = tf.math.unsorted_segment_max(ordered, place, size)  # the least integer where unused
        total = tf.math.unsorted_segment_sum(tf.gather(values, order), place, size)
        return total, tf.maximum(rows, ordered[:1])

    kind, sizes = tf.unstack(tf.reshape(kinds, [-1, 2]), axis=1)

    def are_same() -> tf.Tensor:
        ends, places = tf.cumsum(sizes), tf.range(tf.size(indices, out_type=tf.int64))
        rank = tf.reduce_sum(tf.cast(places[:, tf.newaxis] >= ends, tf.int64), 1)
        starts = ends - sizes
        longest = tf.gather(starts, tf.argmax(sizes))
        return tf.reduce_all(
            tf.equal(indices, tf.gather(indices, longest + places - tf.gather(starts, rank)))
        )

    least = tf.reduce_min(kind)
    are_common = tf.cond(tf.equal(least, _IF_SAME), are_same, lambda: tf.equal(least, _COMMON))
    found: tuple[tf.Tensor, tf.Tensor] = tf.cond(are_common, summed, lambda: (values, indices))
    return found
