"""``hvd.data.files``: rows of many files, which are read where they are needed; and other sources.

These give rows by number: Hugging Face ``datasets``, sources of ``grain`` and others.
"""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_keras.data import reading
from hvd_keras.data.parquet import Tables, completed
from hvd_keras.data.split import WINDOW, Order, Split
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import flatten, pack
from hvd_keras.runtime.process_sets import ProcessSet

_BLOCK = 256  # rows that are likely to lie together
_CHECKED = 3  # rows by which ranks see whether they have the same


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


class Folder(Files):
    """The same of a folder of Parquet files that Spark has written."""

    def paths(self) -> list[str]:
        """List the files. Raises ValueError if there is none, or not yet all."""
        return completed(self.pattern)


@dataclass(frozen=True)
class Opened:
    """Rows by number, which all ranks have counted; ``map`` and ``seeds`` as in ``files``."""

    rows: Any  # ``Tables``, or what has the same methods
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
    windows of about 16,384 rows, or the number that is given. Only row numbers are held in memory.

    The first run reads the lengths of all records, each rank those of some files, and keeps their
    places in files ``.NAME.hvd-index``, which later runs use while size and time of NAME are the
    same. Parquet files need none: row groups are their blocks, read as wholes, and a rank keeps
    its part of those of a window. So give a window at least as many row groups as there are ranks.

    Args:
        pattern: uncompressed TFRecord files (not on PyTorch), or Parquet files, whose names end in
            ``.parquet`` (needs pyarrow): a path with ``*``, ``?``, ``**`` or ``[…]``, or a list of
            paths. They are read in the order of their names; the list's order is kept. All ranks
            must see the same files, or copies.
        columns: of Parquet files, names of columns, nested as ``fit`` takes its data: ``("x",
            "y")``. Numbers, strings, or arrays of numbers, all of one length; those of floating
            point become ``floatx()``. Default: a dictionary of all.
        map: makes a batch of the records of a batch, a tensor of strings, or of the columns, with
            TensorFlow's operations; on PyTorch of the columns, which are tensors (strings: arrays).
            ``uneven="pad"`` needs its y. Default: records or columns.
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


def opened(source: Any, records: Callable[..., Any], process_set: ProcessSet) -> Any:
    """Open a source of files, on all ranks together; return any other as it is.

    ``records`` opens TFRecord files.
    """

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
    is_parquet = paths[0].endswith(".parquet")
    kind, option = (Tables, source.columns) if is_parquet else (records, source.index)
    return Opened(kind(paths, option, process_set), source.map, source.seeds)


class Shares:
    """Which rows of an opened source this rank has in each step."""

    def __init__(self, source: Opened, split: Split) -> None:
        table, shuffle = source.rows, split.shuffle
        if not table.length:
            raise ValueError(f"no row is in {table.paths or 'the source'!s:.200}, expected some.")
        self.split = replace(split, length=table.length)
        window = WINDOW if shuffle is None or shuffle is True else int(shuffle) or None
        self.is_shuffled = window is not None or source.seeds
        self._order = Order(table.starts, window, split.seed)
        if isinstance(table, Tables):
            # A rank's rows lie together, so it needs its part of a window's row groups, and those
            # at the ends.
            table.keep(self._order.blocks_in_window() * split.parts // split.size + 3)

    def whole(self, epoch: int, begin: int, steps: int) -> tuple[Any, Any]:
        """Return row numbers and weights of whole steps, [steps, rows], from ``begin`` on."""
        split, size, rows = self.split, self.split.batch_size, self.split.global_batch
        chosen = self._order.rows(epoch, begin, begin + steps * rows)
        # Of a step's rows each rank takes those that lie together in the files.
        chosen = np.sort(chosen.reshape(steps, rows))
        mine = chosen[:, split.rank * size : (split.rank + split.parts) * size]
        return mine, np.full(mine.shape, split.weight(rows), np.float32)

    def short(self, epoch: int, begin: int) -> tuple[Any, Any]:
        """Return the same of the short last step."""
        split, rows = self.split, self.split.length - begin
        mine = split.places(0, rows)
        # For "pad", rows are copied to fill the step.
        chosen = self._order.rows(epoch, begin, split.length)
        chosen = np.resize(chosen, len(mine) // split.parts * split.size)
        weights = np.where(mine < rows, split.weight(rows), 0)
        return chosen[None, mine], weights[None].astype(np.float32)

    def seeds(self, epoch: int, mine: Any) -> Any:
        """Return the seeds for ``map``, int64 of the shape of the row numbers and 2."""
        return np.stack([np.full(mine.shape, self.split.seed + (int(epoch) << 32)), mine], axis=-1)


def reader(source: Opened, split: Split) -> reading.Source:
    """Read the rows of an opened source step by step, followed by seeds if it has them."""
    shares, table = Shares(source, split), source.rows

    def read(epoch: int, first: int) -> tuple[Any, Any]:
        is_short = first + split.global_batch > table.length
        mine, weights = shares.short(epoch, first) if is_short else shares.whole(epoch, first, 1)
        parts = table.look_up(mine[0])
        return [*parts, shares.seeds(epoch, mine[0])] if source.seeds else parts, weights[0]

    return reading.Source(shares.split, table.description, shares.is_shuffled, read)


def is_row_source(source: Any) -> bool:
    """Whether an object has a length and gives rows by number, but is no array."""
    has_rows = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    is_array = isinstance(source, list | tuple | dict | str | bytes | range) or hasattr(
        source, "__array__"
    )
    return has_rows and not is_array


class Rows:
    """The rows of such a source."""

    paths: tuple[str, ...] = ()
    read_bytes = 0.0  # look_up reads all

    def __init__(self, source: Any) -> None:
        # Of a Hugging Face dataset many rows are read at once, as arrays.
        self._has_columns = hasattr(source, "with_format")
        own = source.format if self._has_columns else {}
        kept = {name: own[name] for name in ("columns", "output_all_columns") if own}
        plain = source.with_format("numpy", **kept) if self._has_columns else source
        has_transform = own.get("type") == "custom"
        self._source = source if has_transform else plain
        self.length = len(source)
        self.starts = np.array([*range(0, self.length, _BLOCK), self.length])
        self.specs: list[Any] = []
        if not self.length:
            return
        some = np.unique(np.linspace(0, self.length - 1, _CHECKED).astype(int))
        first = self._columns(self._source, some) if self._has_columns else source[0]
        self._like = reading.with_tuples(first)
        found = self._get(self._source, some)
        self.specs = list(map(reading.like, found))
        self.row_bytes = sum(part.nbytes for part in found) / len(found[0])
        # A transform may be random.
        self.description = f"sample {reading.digest(self._get(plain, some))}"

    def look_up(self, rows: Any) -> list[Any]:
        """Return the parts of some rows."""
        if not len(rows):
            return self.specs
        found = self._get(self._source, rows)
        for part, like in zip(found, self.specs, strict=True):
            mine = reading.like(part)
            if mine.shape != like.shape or mine.dtype != like.dtype:
                raise ValueError(
                    f"rows {rows[0]} to {rows[-1]} have {part.dtype}{[*part.shape[1:]]}; expected "
                    f"{like.dtype}{[*like.shape[1:]]}, as row 0"
                )
        return found

    def read(self, parts: list[Any]) -> Any:
        """Nest what ``look_up`` returned."""
        return pack(self._like, parts)

    def _get(self, source: Any, rows: Any) -> list[Any]:
        if self._has_columns:
            found = flatten(self._columns(source, rows))
        else:
            # As many parts in each row as in the first.
            each = [flatten(source[int(row)]) for row in rows]
            found = [np.stack([np.asarray(p) for p in parts]) for parts in zip(*each, strict=True)]
        return list(map(reading.as_fit_casts, found))

    @staticmethod
    def _columns(source: Any, rows: Any) -> dict[str, Any]:
        return {name: np.asarray(part) for name, part in source[rows.tolist()].items()}
