"""What changes in Keras's BatchNormalization, Embedding and LossScaleOptimizer.

- Batch normalisation has the statistics of all ranks' batches.
- After the first update of single rows TensorFlow copies a variable whenever it is read as a whole,
  and ``Embedding`` reads its whole table to gather a few rows. Reading only these gives the same.
- ``Adagrad`` updates only rows that have gradients, but computes with all of its accumulator.
- ``LossScaleOptimizer`` (``mixed_float16``) skips an update whose gradients overflow. It checks
  this rank's gradients only: if one rank skipped an update and another did not, their weights would
  differ from then on.

Classes are patched, so that objects that others make are included, such as the optimizers that
``compile`` creates.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import missing_calls, model_ranks, shards, specs
from hvd_keras.runtime import agree, rank_info
from hvd_keras.runtime.keras import innermost, keras
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def SyncBatchNormalization(  # noqa: N802
    process_set: ProcessSet = global_process_set, **kwargs: Any
) -> keras.layers.BatchNormalization:
    """Return a ``keras.layers.BatchNormalization`` with the statistics of the whole batch.

    In training, mean and variance, and their gradients, are computed over the samples of all ranks.
    Every sample has the same weight, even if the ranks' batches differ in size. Use it if the batch
    of one rank is small.

    The layer is Keras's own with ``synchronized=True``, which hvd_keras extends to processes. A
    saved model loads without hvd_keras.

    Args:
        process_set: the ranks whose samples count. ``fit`` uses those that train the model.
        kwargs: the arguments of ``keras.layers.BatchNormalization``.

    Returns:
        The layer.

    Raises:
        ValueError: ``init()`` was not called; or, when the layer is called, it got a mask.

    Example:
        model = keras.Sequential([keras.layers.Conv2D(8, 3), hvd.SyncBatchNormalization()])
    """
    rank_info.rank()  # raises if init() was not called
    layer = keras.layers.BatchNormalization(**{**kwargs, "synchronized": True})
    synchronize_on([layer], process_set)
    return layer


def moments(local_moments: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any:
    """Replace ``BatchNormalization._moments``: moments over all ranks, if ``synchronized=True``."""
    process_set = _process_set(layer)
    if not layer.synchronized or process_set is None:
        return local_moments(layer, inputs, mask)
    return _global_moments(layer.path, inputs, mask, layer._reduction_axes, process_set)


def legacy_moments(
    local_moments: Any, layer: Any, x: Any, axes: list[int], keep_dims: bool, mask: Any = None
) -> Any:
    """Do the same for tf_keras, which has a separate method for synchronised moments."""
    process_set = _process_set(layer)
    if process_set is None:
        return local_moments(layer, x, axes, keep_dims, mask)
    # As Keras 3 does: half precision is too coarse for variances.
    half = x.dtype in (tf.float16, tf.bfloat16)
    values = tf.cast(x, tf.float32) if half else x
    both = _global_moments(layer.name, values, mask, list(axes), process_set)
    if keep_dims:
        sizes = [1 if axis in axes else x.shape[axis] for axis in range(x.shape.rank)]
        both = tf.reshape(both[0], sizes), tf.reshape(both[1], sizes)
    return tf.cast(both[0], x.dtype), tf.cast(both[1], x.dtype)


def synchronize_on(layers: Iterable[Any], process_set: ProcessSet) -> None:
    """Record for the layers of a model which ranks train it. Default: all ranks."""
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            _sets[layer] = process_set


_sets: weakref.WeakKeyDictionary[Any, ProcessSet] = weakref.WeakKeyDictionary()


def _process_set(layer: Any) -> ProcessSet | None:
    """Return the ranks over which a layer computes moments; None if it is this rank alone."""
    is_alone = model_ranks.alone.get() and not missing_calls.fit_has(layer.variables)
    if not rank_info.is_initialized() or is_alone or model_ranks.fits_alone.get():
        return None
    process_set = _sets.get(layer, global_process_set)
    return process_set if process_set.size() > 1 else None


def _global_moments(
    path: str, inputs: tf.Tensor, mask: Any, axes: list[int], process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    """Merge the ranks' moments, weighted by their counts."""
    if mask is not None:
        raise ValueError(
            f"Batch normalisation {path!r} is synchronised between processes and got a mask, which "
            "is not supported. Use synchronized=False, or remove the mask."
        )
    # By the pairwise formula of Chan, Golub and LeVeque (1979, "Updating formulae and a pairwise
    # algorithm for computing sample variances"), which does not cancel as the mean of squares minus
    # the square of the mean would.
    mean, variance = tf.nn.moments(inputs, axes)
    shape = tf.shape(inputs)
    count = tf.cast(tf.reduce_prod([shape[axis] for axis in axes]), inputs.dtype)
    # [1 + 2·channels] of each rank: one allgather per layer and step.
    # Of each channel the mean and the variance over this rank's samples; gradients flow through.
    mine = tf.concat([count[tf.newaxis], mean, variance], axis=0)
    graph = tf.compat.v1.get_default_graph()
    # In a graph of TensorFlow 1, layers have no order, and paths are not unique: a number is.
    is_ordered = tf.executing_eagerly() or graph.building_function
    name = f"{specs.common_path(path)} moments" if is_ordered else None
    gathered = ops.allgather(mine[tf.newaxis], name=name, process_set=process_set)
    size = (tf.shape(mine)[0] - 1) // 2  # channels; gathered is [ranks, 1 + 2·channels]
    weights = gathered[:, :1] / tf.reduce_sum(gathered[:, :1])
    gathered = tf.where(weights > 0, gathered, 0)  # without samples moments are NaN
    means, variances = gathered[:, 1 : 1 + size], gathered[:, 1 + size :]
    total_mean = tf.reduce_sum(weights * means, axis=0)
    deviations = tf.math.squared_difference(means, total_mean)
    return total_mean, tf.reduce_sum(weights * (variances + deviations), axis=0)


_tables = shards.VariableSet()


def read_by_rows(model: Any, layers: Iterable[Any]) -> None:
    """Lets the embeddings of a model read only what is looked up, if the optimizer updates rows."""
    if not any(map(_updates_rows, model_ranks.optimizers_of(model))):
        return
    for layer in layers:
        if isinstance(layer, keras.layers.Embedding) and layer.built:
            _tables.add(*layer.trainable_variables)


def look_up(call: Callable[..., Any], layer: Any, inputs: Any) -> Any:
    """Replace ``Embedding.call``. Negative indices count from the end, as they do in Keras."""
    # A tensor if it is quantized, has an adapter, or is cast by mixed precision.
    table = shards.inner_variable(layer.embeddings)
    is_read_by_rows = isinstance(table, tf.Variable) and table in _tables
    if not is_read_by_rows or not isinstance(inputs, tf.Tensor):  # ragged or sparse
        return call(layer, inputs)
    indices = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    indices = tf.where(indices < 0, indices + table.shape[0], indices)
    return tf.cast(tf.gather(table, indices), layer.compute_dtype)


def _updates_rows(optimizer: Any) -> bool:
    """Whether sparse gradients stay sparse until they are applied."""
    # Other optimizers, and means over several steps, update the whole table. A lookup by rows would
    # then make TensorFlow copy it where something else reads it, such as weight decay.
    optimizer = innermost(optimizer)
    reducer = model_ranks.reducer_of(optimizer)
    kinds = keras.optimizers
    by_rows = (kinds.SGD, kinds.RMSprop, kinds.Adagrad, kinds.Adadelta, kinds.Adafactor)
    return (
        isinstance(optimizer, by_rows)
        and not getattr(optimizer, "momentum", 0)
        and not optimizer.gradient_accumulation_steps
        and reducer is not None
        and not reducer.options.sparse_as_dense
    )


def update_rows(
    update: Callable[..., None], adagrad: Any, gradient: Any, variable: Any, learning_rate: Any
) -> None:
    """Replace ``Adagrad.update_step``: of sparse gradients only the rows, each of them once."""
    # Without epsilon, Keras makes rows without gradients NaN where their accumulator is 0.
    is_sparse = isinstance(gradient, tf.IndexedSlices) and adagrad.epsilon > 0
    own = model_ranks.reducer_of(adagrad)
    if not is_sparse or own is None or own.process_set.size() == 1:
        update(adagrad, gradient, variable, learning_rate)
        return
    slot = adagrad._accumulators[adagrad._get_variable_index(variable)]
    slot, table = shards.inner_variable(slot), shards.inner_variable(variable)
    values = tf.cast(gradient.values, table.dtype)
    rows, place = tf.unique(gradient.indices)
    # As Keras, the square of each gradient, not of the sum of those of a row.
    total, squares = (
        tf.math.unsorted_segment_sum(v, place, tf.size(rows)) for v in (values, tf.square(values))
    )
    sums = tf.gather(slot, rows) + squares
    slot.scatter_update(tf.IndexedSlices(sums, rows))
    step = tf.cast(learning_rate, table.dtype) * total / tf.sqrt(sums + adagrad.epsilon)
    table.scatter_sub(tf.IndexedSlices(step, rows))


def apply_scaled(
    apply: Callable[..., None], scaled: Any, grads: Sequence[Any], trainable_variables: Any = None
) -> None:
    """Replace ``LossScaleOptimizer.apply``: exchanges scaled gradients as soon as they exist."""
    # Otherwise the inner optimizer would exchange them in the branch for finite gradients, where
    # all gradients exist. An infinite one of any rank makes the sum infinite.
    own: Any = model_ranks.reducer_of(scaled)
    # Accumulated gradients are exchanged once per update.
    if own is None or scaled.inner_optimizer.gradient_accumulation_steps:
        apply(scaled, grads, trainable_variables)
        return
    with own.update(grads, trainable_variables) as step:
        apply(scaled, step.finish(), trainable_variables)


def _part_behind_tape(optimizer: Any) -> Any:
    """A part of a table that an optimizer updates, whose gradients a distributed tape returns."""
    weights = [] if model_ranks.alone.get() else optimizer._trainable_variables
    return next((weight for weight in weights if shards.of(weight)), None)


def check_finite(local_check: Callable[..., Any], scaled: Any, grads: Sequence[Any]) -> Any:
    """Replace ``LossScaleOptimizer.check_finite``: true if all ranks' gradients are finite."""
    finite = local_check(scaled, grads)
    own: Any = model_ranks.reducer_within(scaled)
    if not rank_info.is_initialized() or agree.is_building.get():
        return finite
    part: Any = None if own else _part_behind_tape(scaled.inner_optimizer)
    who: Any = own if part is None else shards.of(part)
    if who is None or who.process_set.size() == 1:
        return finite
    step = getattr(own, "step", None)
    if step is not None and not own.is_sharded and not step.divided and step.local is None:
        return finite  # all ranks have the same gradients now
    (everywhere,) = ops.reduce_tensors(
        [tf.cast(finite, tf.bool)],
        op=ops.Min,
        name=f"{own.name if own else specs.common_path(part.path)} gradients are finite",
        process_set=who.process_set,
    )
    return everywhere
