"""Sources with random access: arrays and ``keras.utils.PyDataset``."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.data.split import Source, Split
from hvd_keras.rows import order as rows_order
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import keras


def of_arrays(source: Any, batch_size: int, shuffle: bool | int, seed: int, split: Split) -> Source:
    """Open nested arrays of equally many rows. A rank reads only its own rows."""
    parts, spec, length = _look_into(source, cast=True)
    dtypes = [part.dtype.as_numpy_dtype for part in tf.nest.flatten(spec)]
    global_batch = split.size * batch_size

    def read(epoch: int, first: int) -> list[Any]:
        rows = min(global_batch, length - first)
        places = split.places(first, rows, batch_size)
        # The row numbers of this rank's batch: [count], places beyond the end begin again.
        order = rows_order(length, shuffle, seed, epoch)[places % length]
        weight = split.weight(rows, length, batch_size)
        mine = [p[order].astype(d, copy=False) for p, d in zip(parts, dtypes, strict=True)]
        return [*mine, _weights(places < length, weight)]

    sample = np.linspace(0, length - 1, min(length, 9)).astype(int)
    description = f"sample {digest([p[sample] for p in parts])}"
    return _read_by(read, spec, length, batch_size, 1, split, description, bool(shuffle))


def of_batches(source: Any, shuffle: bool | int, seed: int, split: Split) -> Source:
    """Open a ``PyDataset``. A rank reads only its own batches, and its rows of the last step."""
    number = number_of_batches(source)
    if not number:
        raise ValueError(f"the PyDataset has {number} batches, expected 1 or more.")
    first = source[0]
    _, spec, batch_size = _look_into(first)
    length = (number - 1) * batch_size + _look_into(source[number - 1])[2]
    whole, global_batch = length // batch_size, split.size * batch_size

    def batch(epoch: int, index: int) -> list[Any]:
        if index < whole:
            index = int(rows_order(whole, shuffle, seed, epoch)[index])
        parts, _, rows = _look_into(source[index])
        if rows != min(batch_size, length - index * batch_size):
            text = f"batch {index} of the PyDataset has {rows} rows, the first had {batch_size}."
            raise ValueError(f"{text} Only the last may have fewer, the same number each time.")
        return parts

    def read(epoch: int, first: int) -> list[Any]:
        rows = min(global_batch, length - first)
        if split.uneven == "share" and rows < global_batch:
            count = rows // split.size
            # Whole batches are read, so rows that follow each other cost the fewest reads.
            start = first + split.rank * count
            indices = range(start // batch_size, (start + count - 1) // batch_size + 1)
            batches = zip(*(batch(epoch, index) for index in indices), strict=True)
            skip = start % batch_size
            mine = [np.concatenate(parts)[skip : skip + count] for parts in batches]
            return [*mine, _weights(np.ones(count, bool), 1.0)]
        place = first // batch_size + split.rank
        parts = batch(epoch, place % number)
        numbers, real = np.arange(batch_size), len(parts[0])
        weights = _weights(
            (numbers < real) & (place < number), split.weight(rows, length, batch_size)
        )
        return [*(part[numbers % real] for part in parts), weights]

    workers = max(1, getattr(source, "workers", 1))
    description = f"sample {digest(y_of(first))}"
    shuffles, unit = bool(shuffle), batch_size
    return _read_by(read, spec, length, batch_size, workers, split, description, shuffles, unit)


def number_of_batches(source: Any) -> int | None:
    """Return the length of a ``PyDataset``; None if it is infinite."""
    return getattr(source, "num_batches", None) if hasattr(source, "num_batches") else len(source)


def y_of(batch: Any) -> list[Any]:
    """The parts of y, because augmentation does not change it; those of x if there is no y."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return list(tf.nest.flatten(x if y is None else y, expand_composites=True))


def digest(parts: list[Any]) -> str:
    """Return a short text that is equal if the arrays are equal."""
    crc = 0
    for part in parts:
        crc = agree.crc(part, crc)
    return f"{crc:08x}"


def _read_by(
    read: Any,
    spec: Any,
    length: int,
    batch_size: int,
    workers: int,
    split: Split,
    description: str,
    is_shuffled: bool,
    unit: int = 1,
) -> Source:
    """Make a source from a function.

    ``read(epoch, first)`` returns the parts of this rank's batch, and the weights for "pad", of the
    step whose first row is the ``first`` in the epoch's order.
    """
    specs = [*tf.nest.flatten(spec), tf.TensorSpec((), tf.float32)]
    steps, global_batch = split.steps(length, batch_size), split.size * batch_size
    # Fixed shapes let TensorFlow trace the step once; a shorter last step would be a second trace.
    rows = None if split.has_short_step(length, batch_size) else batch_size

    def read_step(epoch: int, row: int, step: int) -> list[Any]:
        if step >= split.steps_from(row, length, batch_size):
            raise IndexError(beyond(row, length))
        return list(read(epoch, row + step * global_batch))

    def batch(epoch: Any, row: Any, step: Any) -> Any:
        parts = tf.numpy_function(read_step, (epoch, row, step), [part.dtype for part in specs])
        for part, known in zip(parts, specs, strict=True):
            part.set_shape([rows, *known.shape])
        data = tf.nest.pack_sequence_as(spec, parts[:-1])
        return (data, parts[-1]) if split.uneven == "pad" else data

    # Python code, one call at a time: more workers help those that wait, such as for files.
    def batches(epoch: Any, row: Any) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(steps)
        return numbers.map(lambda step: batch(epoch, row, step), num_parallel_calls=workers)

    left_out = split.left_out(length, batch_size)
    return Source(
        spec, length, batch_size, steps, left_out, description, is_shuffled, batches, unit
    )


def beyond(row: int, length: int) -> str:
    """Return what is wrong if more is read than the rest of an interrupted epoch."""
    return (
        f"nothing follows the rest of an interrupted epoch, from row {row} of {length}; expected "
        "it to be read in fit, by as many steps as remain"
    )


def _weights(real: Any, weight: float) -> Any:
    return np.where(real, weight, 0).astype(np.float32)


def _look_into(source: Any, cast: bool = False) -> tuple[list[Any], Any, int]:
    """Nested arrays as a flat list, the spec of a row, and the number of rows.

    With ``cast``, floating-point rows have the dtype to which Keras's ``fit`` casts them.
    """
    source = with_tuples(source)
    parts = [np.asarray(part) for part in tf.nest.flatten(source)]
    if not parts or any(part.ndim == 0 for part in parts):
        raise ValueError(
            f"got {source!r:.99}, expected arrays, tf.data.Dataset or PyDataset. "
            "Convert a list of numbers to an array: np.asarray(x)."
        )
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            f"got arrays of {[len(part) for part in parts]} rows, expected one length."
        )
    for part in parts:
        if part.dtype == object and not isinstance(part.flat[0] if part.size else "", str | bytes):
            raise ValueError(
                f"an array has rows of type {type(part.flat[0]).__name__}, expected numbers or "
                "strings. Convert it: x.astype('float32'), or for rows of different lengths "
                "tf.ragged.constant(x)."
            )
    dtypes = [tf.as_dtype(part.dtype) for part in parts]
    if cast:
        floatx = tf.as_dtype(keras.backend.floatx())
        dtypes = [floatx if dtype.is_floating else dtype for dtype in dtypes]
    specs = [tf.TensorSpec(p.shape[1:], d) for p, d in zip(parts, dtypes, strict=True)]
    return parts, tf.nest.pack_sequence_as(source, specs), len(parts[0])


def with_tuples(source: Any) -> Any:
    """Nested arrays with tuples for lists, as specifications have them."""
    if isinstance(source, dict):
        return type(source)((key, with_tuples(part)) for key, part in source.items())
    if isinstance(source, (list, tuple)) and not hasattr(source, "_fields"):
        return tuple(map(with_tuples, source))
    return source
