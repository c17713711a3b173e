"""Sources with random access as ``tf.data``: arrays and ``keras.utils.PyDataset``."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.rows import Split, reading
from hvd_keras.rows.passes import Source
from hvd_keras.runtime.keras import keras


def of_arrays(source: Any, batch_size: int, shuffle: bool | int, seed: int, split: Split) -> Source:
    """Open nested arrays of equally many rows. A rank reads only its own rows."""
    parts, spec = _look_into(source, cast=True)
    dtypes = [part.dtype.as_numpy_dtype for part in tf.nest.flatten(spec)]
    reader = reading.of_arrays(parts, dtypes, batch_size, bool(shuffle), seed, split)
    return _source(reader, spec, split)


def of_batches(source: Any, shuffle: bool | int, seed: int, split: Split) -> Source:
    """Open a ``PyDataset``. A rank reads only its own batches, and its rows of the last step."""
    first = reading.first_batch(source)
    reader = reading.of_batches(source, first, flatten, bool(shuffle), seed, split)
    return _source(reader, _look_into(first)[1], split)


def flatten(nested: Any) -> list[Any]:
    """Return the parts, and those of ragged and sparse tensors."""
    return list(tf.nest.flatten(nested, expand_composites=True))


def _source(reader: reading.Reader, spec: Any, split: Split) -> Source:
    """Make a source of what a reader reads."""
    specs = [*tf.nest.flatten(spec), tf.TensorSpec((), tf.float32)]
    length, batch_size, steps, left_out = reader.numbers()
    # Fixed shapes let TensorFlow trace the step once; a shorter last step would be a second trace.
    rows = None if split.has_short_step(length, batch_size) else batch_size

    def read_step(epoch: int, row: int, step: int) -> list[Any]:
        parts, weights = reader.read_step(epoch, row, step)
        return [*parts, weights]

    def steps_from(row: int) -> Any:
        return np.int64(split.steps_from(row, length, batch_size))

    def batch(epoch: Any, row: Any, step: Any) -> Any:
        parts = tf.numpy_function(read_step, (epoch, row, step), [part.dtype for part in specs])
        for part, known in zip(parts, specs, strict=True):
            part.set_shape([rows, *known.shape])
        data = tf.nest.pack_sequence_as(spec, parts[:-1])
        return (data, parts[-1]) if split.uneven == "pad" else data

    # Python code, one call at a time: more workers help those that wait, such as for files.
    def batches(epoch: Any, row: Any) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(tf.numpy_function(steps_from, [row], tf.int64))
        calls = reader.workers
        return numbers.map(lambda step: batch(epoch, row, step), num_parallel_calls=calls)

    description, is_shuffled = reader.description, reader.is_shuffled
    return Source(
        *(spec, length, batch_size, steps, left_out, description, is_shuffled, batches),
        reader.unit,
    )


def _look_into(source: Any, cast: bool = False) -> tuple[list[Any], Any]:
    """Nested arrays as a flat list, and the spec of a row.

    With ``cast``, floating-point rows have the dtype to which Keras's ``fit`` casts them.
    """
    source = reading.with_tuples(source)
    parts = reading.parts_of(source, tf.nest.flatten)
    dtypes = [tf.as_dtype(part.dtype) for part in parts]
    if cast:
        floatx = tf.as_dtype(keras.backend.floatx())
        dtypes = [floatx if dtype.is_floating else dtype for dtype in dtypes]
    specs = [tf.TensorSpec(p.shape[1:], d) for p, d in zip(parts, dtypes, strict=True)]
    return parts, tf.nest.pack_sequence_as(source, specs)
