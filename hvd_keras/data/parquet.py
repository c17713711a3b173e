"""Parquet files: columns as arrays, and rows by number."""

import functools
from typing import Any

import numpy as np

from hvd_keras.data import reading
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import flatten, pack
from hvd_keras.runtime.process_sets import ProcessSet

_KEPT = 100  # files whose metadata are


class Tables:
    """The rows of several files, by number. Row groups are read as wholes, and some are kept.

    Args:
        paths: in the order of their rows.
        columns: nested names; None: a dictionary of all.
        process_set: ranks that share the work of counting.
    """

    def __init__(self, paths: list[str], columns: Any, process_set: ProcessSet) -> None:
        self.paths, self.read_bytes = paths, 0.0
        # That of many small row groups takes longer to read than one of them.
        self._metadata = functools.lru_cache(_KEPT)(lambda path: _open(path).metadata)
        counts: dict[str, list[list[int]]] = {}  # rows and bytes of the row groups of each file

        def count(number: int) -> None:
            with _open(paths[number]) as file:
                facts = file.metadata
            groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
            counts[str(number)] = [[group.num_rows, group.total_byte_size] for group in groups]

        reading.look_into_some(len(paths), count, process_set)
        for theirs in agree.gather_json("hvd.data.files counts", counts, process_set):
            counts.update(theirs)
        found = [(f, i, *c) for f in range(len(paths)) for i, c in enumerate(counts[str(f)])]
        self._groups = [(f, i) for f, i, _, _ in found]
        self.starts = np.concatenate([[0], np.cumsum([n for _, _, n, _ in found], dtype=np.int64)])
        self.length = int(self.starts[-1])
        self.row_bytes = sum(size for *_, size in found) / max(1, self.length)
        self.description = f"{len(paths)} files {agree.digest(self.starts):016x}"
        self.specs: list[Any] = []
        self._group = self._read
        if self.length:
            look = functools.partial(self._look_at_columns, columns)
            agree.on_all_ranks("hvd.data.files", look, process_set)

    def _look_at_columns(self, columns: Any) -> None:
        path = self.paths[self._groups[0][0]]
        with _open(path) as file:
            known = file.schema_arrow.names
        every = {name: name for name in known}
        self._columns = every if columns is None else reading.with_tuples(columns)
        self._names = flatten(self._columns)
        missing = [name for name in self._names if name not in known]
        if missing:
            raise ValueError(f"{path} has no columns {missing}, expected some of {known}.")
        arrays = self._read(next(n for n in range(len(self._groups)) if np.diff(self.starts)[n]))
        self.specs = list(map(reading.like, arrays))

    def keep(self, groups: int) -> None:
        """Keep so many row groups in memory."""
        self._group = functools.lru_cache(groups)(self._read)

    def look_up(self, rows: Any) -> list[Any]:
        """Return the columns of some rows."""
        groups = np.searchsorted(self.starts, rows, "right") - 1
        found = [np.empty((len(rows), *like.shape[1:]), like.dtype) for like in self.specs]
        for group in np.unique(groups):
            chosen = groups == group
            columns = self._group(int(group))
            for part, column, name in zip(found, columns, self._names, strict=True):
                if column.shape[1:] != part.shape[1:] or column.dtype != part.dtype:
                    raise ValueError(
                        f"column {name!r} of {self.paths[self._groups[group][0]]} has "
                        f"{column.dtype}{[*column.shape[1:]]} in each row; expected "
                        f"{part.dtype}{[*part.shape[1:]]}, as in the first file"
                    )
                part[chosen] = column[rows[chosen] - self.starts[group]]
        return found

    def read(self, parts: list[Any]) -> Any:
        """Nest what ``look_up`` returned."""
        return pack(self._columns, parts)

    def _read(self, number: int) -> list[Any]:
        """Return the columns of a row group."""
        file, group = self._groups[number]
        path = self.paths[file]
        with _open(path, self._metadata(path)) as opened:
            table = opened.read_row_group(group, columns=self._names)
        if table.num_rows != self.starts[number + 1] - self.starts[number]:
            raise ValueError(f"{path} has changed since its rows were counted.")
        arrays = [array_of(name, table[name].combine_chunks()) for name in self._names]
        return list(map(reading.as_fit_casts, arrays))


def _place(path: str) -> tuple[Any, str]:
    """Return the file system of a path or a URI, whose characters stand for themselves."""
    try:
        from pyarrow import fs
    except ImportError as error:
        text = "pyarrow is missing; run: pip install pyarrow on all hosts"
        raise ValueError(text) from error
    scheme, is_remote, rest = path.removeprefix("file://").partition("://")
    if not is_remote:
        return fs.LocalFileSystem(), scheme
    host, _, name = rest.partition("/")
    system, root = fs.FileSystem.from_uri(f"{scheme}://{host}/")
    return system, f"{root.rstrip('/')}/{name}"


def _open(path: str, metadata: Any = None) -> Any:
    system, there = _place(path)
    from pyarrow import parquet

    return parquet.ParquetFile(there, metadata=metadata, filesystem=system)


def completed(path: str) -> list[str]:
    """List the Parquet files in a folder. ValueError unless Spark has completed it."""
    system, there = _place(path)
    from pyarrow import fs

    found = system.get_file_info(fs.FileSelector(there, allow_not_found=True))
    names = sorted(info.base_name for info in found)
    if "_SUCCESS" not in names:
        raise ValueError(
            f"{path} has no _SUCCESS; expected the folder that hvd.spark.shard has written, on a "
            "file system that the driver and all executors share"
        )
    return [f"{path}/{name}" for name in names if name.endswith(".parquet")]


def array_of(name: str, column: Any) -> Any:
    """Return a column of pyarrow as an array of shape [rows, ...]."""
    from pyarrow import types

    if column.null_count:
        raise ValueError(f"column {name!r} has nulls; expected a value in each row (df.fillna)")
    kinds = types.is_list, types.is_large_list, types.is_fixed_size_list
    if not any(is_kind(column.type) for is_kind in kinds):
        array = column.to_numpy(zero_copy_only=False)
        is_other = array.dtype.kind not in "biuf" and array.size > 0
        if is_other and not isinstance(array.flat[0], str | bytes):
            raise ValueError(
                f"column {name!r} has the type {column.type}; expected numbers, strings, or arrays "
                "of them"
            )
        return array
    lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise ValueError(
            f"column {name!r} has arrays of {lengths.min()} to {lengths.max()} values; expected "
            "the same number in each row"
        )
    values = array_of(name, column.flatten())
    return values.reshape(len(column), int(lengths[0]), *values.shape[1:])
