"""``hvd.data.files``: rows of many files, which are read where they are needed."""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.data.order import WINDOW, Order
from hvd_keras.data.parquet import Tables
from hvd_keras.data.records import Records
from hvd_keras.data.row_sources import Rows
from hvd_keras.rows import Split, reading
from hvd_keras.rows.passes import Source
from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet

_ROWS, _BYTES = 1 << 13, 1 << 26  # of all ranks, that Python looks up at once
_READ = 1 << 20  # bytes, about, that are read at once


@dataclass(frozen=True)
class Files:
    """What ``hvd.data.files`` returns, for ``hvd.data.shard``."""

    pattern: Any
    columns: Any
    map: Callable[..., Any] | None
    seeds: bool
    index: str | None

    def paths(self) -> list[str]:
        """List the files. Raises ValueError if there is none."""
        if isinstance(self.pattern, str | os.PathLike):
            paths = sorted(glob.glob(os.fspath(self.pattern), recursive=True))
        else:
            paths = [os.fspath(path) for path in self.pattern]
        if not paths:
            raise ValueError(f"no file matches {self.pattern!r} on {os.uname().nodename}.")
        return paths


@dataclass(frozen=True)
class Opened:
    """Rows by number, which all ranks have counted; ``map`` and ``seeds`` as in ``files``."""

    rows: Records | Tables | Rows
    map: Callable[..., Any] | None = None
    seeds: bool = False


def files(
    pattern: str | os.PathLike[str] | Sequence[str],
    *,
    columns: Any = None,
    map: Callable[..., Any] | None = None,
    seeds: bool = False,
    index: str | None = None,
) -> Files:
    """Name files of rows, a source for ``hvd.data.shard``, of which each rank reads its rows only.

    The files may have any numbers of rows, and may be fewer than the ranks. An epoch can begin at
    any row without reading those before, so ``hvd.callbacks.Checkpoint`` continues at once, on any
    number of ranks, in the same order.

    ``shard(files(…), shuffle=…)`` shuffles blocks of rows that follow each other, and the rows of
    windows of 16,384 rows, or of the number that is given. Only row numbers are held in memory.

    The first run reads the lengths of all records, each rank those of some files, and keeps their
    places in files ``.NAME.hvd-index``, which later runs use while size and time of NAME are the
    same. Parquet files need none: row groups are their blocks, read as wholes, and a rank keeps
    its part of those of a window. So give a window at least as many row groups as there are ranks.

    Args:
        pattern: uncompressed TFRecord files, or Parquet files, whose names end in ``.parquet``
            (needs pyarrow): a path with ``*``, ``?``, ``**`` or ``[…]``, or a list of paths. They
            are read in the order of their names; the list's order is kept. All ranks must see the
            same files, or copies.
        columns: of Parquet files, names of columns, nested as ``fit`` takes its data: ``("x",
            "y")``. Numbers, strings, or arrays of numbers, all of one length; those of floating
            point become ``floatx()``. Default: a dictionary of all.
        map: makes a batch of the records of a batch, a tensor of strings, or of the columns, with
            TensorFlow's operations. ``uneven="pad"`` needs its y. Default: records or columns.
        seeds: call ``map(records, seeds)`` with int64 ``seeds`` of shape [records, 2] that depend
            on row and epoch only, for ``tf.image.stateless_random_…``: random changes are then the
            same after a restart, and on any number of ranks.
        index: a folder for what is kept of TFRecord files. Default: beside each, or if that folder
            may not be written, nowhere.

    Returns:
        A source for ``hvd.data.shard``.

    Example:
        def parse(records):
            example = tf.io.parse_example(records, {"x": tf.io.FixedLenFeature([4], tf.float32)})
            return example["x"]

        data = hvd.data.shard(hvd.data.files("train-*.tfrecord", map=parse), batch_size=32)
    """
    return Files(pattern, columns, map, seeds, index)


def opened(source: Any, process_set: ProcessSet) -> Any:
    """Open a source of files, on all ranks together; return any other as it is."""

    def look() -> list[str] | None:
        paths = source.paths() if isinstance(source, Files) else None
        if paths and source.columns is not None and not paths[0].endswith(".parquet"):
            raise ValueError(f"columns={source.columns!r} of {paths[0]}, expected a .parquet file.")
        return paths

    # Before anything that only ranks with files do, so that none waits for others in vain.
    paths = agree.on_all_ranks("hvd.data.files", look, process_set)
    names = paths and [os.path.basename(path) for path in paths]
    gathered = agree.gather_if_different("hvd.data.files names", names, process_set)
    if gathered:
        short = [f"{theirs and len(theirs)} files {theirs!r:.200}" for theirs in gathered]
        raise ValueError(
            "hvd.data.shard: the ranks have different files: "
            f"{agree.by_rank(short, process_set)}. Give all the same, or copies of them."
        )
    if paths is None:
        return source
    if paths[0].endswith(".parquet"):
        tables = Tables(paths, source.columns, process_set)
        return Opened(tables, source.map, source.seeds)
    return Opened(Records(paths, source.index, process_set), source.map, source.seeds)


def of_rows(
    source: Opened, batch_size: int, shuffle: bool | int | None, seed: int, split: Split
) -> Source:
    """Open rows by number: a rank reads only its own."""
    table = source.rows
    length = table.length
    if not length:
        raise ValueError(f"{len(table.paths)} files have no rows: {table.paths!r:.200}.")
    window = WINDOW if shuffle is None or shuffle is True else int(shuffle) or None
    order = Order(table.starts, window, seed)
    # A rank's rows lie together, so it needs its part of a window's blocks, and those at the ends.
    table.keep(order.blocks_in_window() // split.size + 3)
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
            # The short last step, a part by itself.
            rows = length - begin
            count = rows // split.size if split.uneven == "share" else batch_size
            # For "pad", rows are copied to fill the step.
            chosen = np.resize(order.rows(epoch, begin, length), count * split.size)
            mine = chosen[None, split.rank :: split.size]
            real = np.arange(split.rank, count * split.size, split.size) < rows
            weights = np.where(real, split.weight(rows, length, batch_size), 0)[None]
        else:
            if row and not number:
                raise IndexError(reading.beyond(row, length))
            chosen = order.rows(epoch, begin, begin + number * global_batch)
            # Of a step's rows each rank takes those that lie together in the files.
            chosen = np.sort(chosen.reshape(number, global_batch))
            mine = chosen[:, split.rank * batch_size : (split.rank + 1) * batch_size]
            weights = np.full(mine.shape, split.weight(global_batch, length, batch_size))
        several = 1 if len(mine) % group else group
        shape = len(mine) // several, several, mine.shape[1]
        mine, weights = mine.reshape(shape), weights.reshape(shape)
        parts = table.look_up(mine.reshape(-1))
        parts = [part.reshape(*mine.shape, *part.shape[1:]) for part in parts]
        if source.seeds:
            parts.append(np.stack([np.full(mine.shape, seed + (int(epoch) << 32)), mine], axis=3))
        return [*parts, weights.astype(np.float32)] if pads else parts

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
        specs = [*table.specs, *[tf.TensorSpec([2], tf.int64)] * source.seeds]
        specs += [tf.TensorSpec((), tf.float32)] * pads
        found = tf.numpy_function(find, place, [spec.dtype for spec in specs])
        for tensor, spec in zip(found, specs, strict=True):
            tensor.set_shape([None, None, known, *spec.shape])
        return tuple(found)

    zero = tf.zeros((), tf.int64)
    spec = batches(zero, zero).element_spec
    return Source(
        *(spec[0] if pads else spec, length, batch_size, steps),
        *(split.left_out(length, batch_size), table.description, window is not None),
        *(batches, 1),
    )
