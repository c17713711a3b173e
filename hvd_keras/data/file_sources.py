"""The rows of files, and of objects that give rows by number, as ``tf.data``."""

from typing import Any

import tensorflow as tf

from hvd_keras.rows import Split
from hvd_keras.rows.files import Opened, Shares
from hvd_keras.rows.passes import Source

_ROWS, _BYTES = 1 << 13, 1 << 26  # of all ranks, that Python looks up at once
_READ = 1 << 20  # bytes, about, that are read at once


def of_rows(
    source: Opened, batch_size: int, shuffle: bool | int | None, seed: int, split: Split
) -> Source:
    """Open rows by number: a rank reads only its own."""
    table = source.rows
    length, shares = table.length, Shares(source, batch_size, shuffle, seed, split)
    global_batch = split.size * batch_size
    steps, pads = split.steps(length, batch_size), split.uneven == "pad"
    changes = pads or source.map is not None
    # Python looks up the rows of several steps at once: for each it would be too slow.
    together = max(1, int(min(_ROWS, _BYTES / table.row_bytes)) // global_batch)
    # Some of these steps are read at once: a call for each would cost more than short records do.
    group = min(together, max(1, int(_READ / (table.read_bytes * batch_size or 1))))
    together -= together % group

    def find(epoch: int, row: int, part: int) -> list[Any]:
        """Return what is looked up of this rank's rows in the next steps: [groups, steps, rows]."""
        left = split.steps_from(row, length, batch_size)
        whole = min(left, (length - row) // global_batch)
        first = min(part * together, whole)
        begin, number = row + first * global_batch, min(together, whole - first)
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
            batch = source.map(batch, more[0]) if source.seeds else source.map(batch)
        return (batch, more[-1]) if pads else batch

    def batches(epoch: Any, row: Any) -> tf.data.Dataset:
        # A short step comes alone, and so may be one more part.
        parts = tf.data.Dataset.range(-(-steps // together) + 1)
        found = parts.map(lambda part: _find(epoch, row, part)).prefetch(1)
        steps_read = found.unbatch().map(read, tf.data.AUTOTUNE).unbatch()
        return steps_read.map(change, tf.data.AUTOTUNE) if changes else steps_read

    # Fixed shapes let TensorFlow trace the step once.
    known = None if split.has_short_step(length, batch_size) else batch_size

    def _find(*place: Any) -> Any:
        # Each tensor costs time in each step, so none travels that is not needed.
        specs = [tf.TensorSpec(like.shape[1:], tf.as_dtype(like.dtype)) for like in table.specs]
        specs += [*[tf.TensorSpec([2], tf.int64)] * source.seeds]
        specs += [tf.TensorSpec((), tf.float32)] * pads
        found = tf.numpy_function(find, place, [spec.dtype for spec in specs])
        for tensor, spec in zip(found, specs, strict=True):
            tensor.set_shape([None, None, known, *spec.shape])
        return tuple(found)

    zero = tf.zeros((), tf.int64)
    spec = batches(zero, zero).element_spec
    return Source(
        *(spec[0] if pads else spec, length, batch_size, steps),
        *(split.left_out(length, batch_size), table.description, shares.is_shuffled),
        *(batches, 1),
    )
