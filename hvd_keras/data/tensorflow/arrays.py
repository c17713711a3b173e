"""Sources with rows by number as ``tf.data``: arrays, ``keras.utils.PyDataset``, files."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.data import reading
from hvd_keras.data.reading import Source
from hvd_keras.data.row_files import Opened, Shares
from hvd_keras.data.split import Split
from hvd_keras.runtime.keras import converted

_ROWS, _BYTES = 1 << 13, 1 << 26  # of all ranks, that Python looks up at once
_READ = 1 << 20  # bytes, about, that are read at once


def arrays_source(source: Any, split: Split) -> Source:
    """Open nested arrays of equally many rows. A rank reads only its own rows."""
    parts, spec = _look_into(source, cast=True)
    return _source(reading.arrays_reader(parts, split), spec)


def pydataset_source(source: Any, split: Split) -> Source:
    """Open a ``PyDataset``. A rank reads only its own batches, and its rows of the last step."""
    ends = first, last = reading.end_batches(source)
    if any(isinstance(part, tf.RaggedTensor | tf.SparseTensor) for part in tf.nest.flatten(first)):
        raise ValueError(
            "the PyDataset has ragged or sparse batches, expected arrays. Pad them, or give "
            "hvd.data.shard a tf.data.Dataset."
        )
    reader = reading.pydataset_reader(source, ends, flatten, split)
    spec, several = _look_into(first)[1], (reading.number_of_batches(source) or 1) > 2
    for batch in (last, *([source[1]] if several else ())):  # each may be padded by itself
        spec = tf.nest.map_structure(_either, spec, _look_into(batch)[1])
    return _source(reader, spec)


def _either(one: tf.TensorSpec, other: tf.TensorSpec) -> tf.TensorSpec:
    """The spec of rows that are as one of two, if they have equally many dimensions."""
    is_like = one.shape.rank == other.shape.rank
    return (one.most_specific_common_supertype([other]) if is_like else None) or one


def flatten(nested: Any) -> list[Any]:
    """Return the parts, and those of ragged and sparse tensors."""
    return list(tf.nest.flatten(nested, expand_composites=True))


def _source(reader: Source, spec: Any) -> Source:
    """Return a source with what it reads as datasets."""
    specs = [*tf.nest.flatten(spec), tf.TensorSpec((), tf.float32)]
    split = reader.split

    def read_step(epoch: int, row: int, step: int) -> list[Any]:
        parts, weights = reader.read_step(epoch, row, step)
        return [*parts, weights]

    def steps_from(row: int) -> Any:
        return np.int64(split.steps_from(row))

    def batch(epoch: Any, row: Any, step: Any) -> Any:
        parts = tf.numpy_function(read_step, (epoch, row, step), [part.dtype for part in specs])
        for part, known in zip(parts, specs, strict=True):
            part.set_shape([split.static_rows, *known.shape])
        data = tf.nest.pack_sequence_as(spec, parts[:-1])
        return (data, parts[-1]) if split.uneven == "pad" else data

    # Python code, one call at a time: more workers help those that wait, such as for files.
    def batches(epoch: Any, row: Any) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(tf.numpy_function(steps_from, [row], tf.int64))
        calls = reader.workers
        return numbers.map(lambda step: batch(epoch, row, step), num_parallel_calls=calls)

    return dataclasses.replace(reader, spec=spec, batches=batches)


def _look_into(source: Any, cast: bool = False) -> tuple[list[Any], Any]:
    """Nested arrays as a flat list, and the spec of a row.

    With ``cast``, floating-point rows have the dtype to which Keras's ``fit`` casts them.
    """
    source = reading.with_tuples(source)
    parts = reading.parts_of(source, tf.nest.flatten)
    dtypes = [(reading.as_fit_casts(part[:0]) if cast else part).dtype for part in parts]
    specs = [tf.TensorSpec(p.shape[1:], d) for p, d in zip(parts, dtypes, strict=True)]
    return parts, tf.nest.pack_sequence_as(source, specs)


def numbered_rows_source(source: Opened, split: Split) -> Source:
    """Open rows by number: a rank reads only its own."""
    table, shares = source.rows, Shares(source, split)
    split, pads = shares.split, split.uneven == "pad"
    changes = pads or source.map is not None
    # Python looks up the rows of several steps at once: for each it would be too slow.
    together = max(1, int(min(_ROWS, _BYTES / table.row_bytes)) // split.global_batch)
    # Some of these steps are read at once: a call for each would cost more than short records do.
    group = min(together, max(1, int(_READ / (table.read_bytes * split.batch_size or 1))))
    together -= together % group

    def find(epoch: int, row: int, part: int) -> list[Any]:
        """Return what is looked up of this rank's rows in the next steps: [groups, steps, rows]."""
        left = split.steps_from(row)
        whole = min(left, (split.length - row) // split.global_batch)
        first = min(part * together, whole)
        begin, number = row + first * split.global_batch, min(together, whole - first)
        if not number and left > whole and part * together < whole + together:
            mine, weights = shares.short(epoch, begin)  # a part by itself
        else:
            mine, weights = shares.whole(epoch, begin, number)
        several = 1 if len(mine) % group else group
        shape = len(mine) // several, several, mine.shape[1]
        mine, weights = mine.reshape(shape), weights.reshape(shape)
        parts = table.look_up(mine.reshape(-1))
        parts = [part.reshape(*mine.shape, *part.shape[1:]) for part in parts]
        if source.seeds:
            parts.append(shares.seeds(epoch, mine))
        return [*parts, weights] if pads else parts

    def read(*parts: Any) -> Any:
        found, more = parts[: len(table.specs)], parts[len(table.specs) :]
        batch = table.read([*found])
        return (batch, *more) if changes else batch

    def change(batch: Any, *more: Any) -> Any:
        if source.map is not None:
            given = [more[0]] if source.seeds else []
            batch = converted(source.map)(batch, *given)
        return (batch, more[-1]) if pads else batch

    def batches(epoch: Any, row: Any) -> tf.data.Dataset:
        # A short step comes alone, and so may be one more part.
        parts = tf.data.Dataset.range(-(-split.steps // together) + 1)
        found = parts.map(lambda part: _find(epoch, row, part)).prefetch(1)
        steps_read = found.unbatch().map(read, tf.data.AUTOTUNE).unbatch()
        return steps_read.map(change, tf.data.AUTOTUNE) if changes else steps_read

    def _find(*place: Any) -> Any:
        # Each tensor costs time in each step, so none travels that is not needed.
        specs = [tf.TensorSpec(like.shape[1:], tf.as_dtype(like.dtype)) for like in table.specs]
        specs += [*[tf.TensorSpec([2], tf.int64)] * source.seeds]
        specs += [tf.TensorSpec((), tf.float32)] * pads
        found = tf.numpy_function(find, place, [spec.dtype for spec in specs])
        for tensor, spec in zip(found, specs, strict=True):
            tensor.set_shape([None, None, split.static_rows, *spec.shape])
        return tuple(found)

    zero = tf.zeros((), tf.int64)
    spec = batches(zero, zero).element_spec
    of_row = tf.nest.map_structure(_of_row, spec[0] if pads else spec)
    return Source(split, table.description, shares.is_shuffled, spec=of_row, batches=batches)


def _of_row(spec: Any) -> Any:
    """The specification of a row, by that of a batch, whose size may differ by rank."""
    is_tensor = isinstance(spec, tf.TensorSpec) and spec.shape.rank
    return tf.TensorSpec(spec.shape[1:], spec.dtype) if is_tensor else spec
