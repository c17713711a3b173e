"""Batches of rows from a folder of Parquet files."""

import bisect
import itertools
from typing import Any

from hvd_keras.data.parquet import array_of
from hvd_keras.runtime.keras import keras


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batch b has the rows from b * batch_size on, in the order of the files' names.

    Args:
        path: the folder, which Spark has completed.
        columns: nested names of columns.
        batch_size: rows of each batch; the last may have fewer.

    Raises:
        ValueError: pyarrow is missing, or the folder is, or was not completed.
    """

    def __init__(self, path: str, columns: Any, batch_size: int) -> None:
        super().__init__()
        try:
            from pyarrow import dataset, fs
        except ImportError as error:
            text = "pyarrow is missing; run: pip install 'hvd_keras[spark]' on all hosts"
            raise ValueError(text) from error
        system, folder = fs.FileSystem.from_uri(path if "://" in path else f"file://{path}")
        there = system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        if not any(info.base_name == "_SUCCESS" for info in there):
            raise ValueError(
                f"{path} has no _SUCCESS; expected the folder that hvd.spark.shard has written, "
                "on a file system that the driver and all executors share"
            )
        found = dataset.dataset(folder, filesystem=system, format="parquet")  # sorted by name
        self._groups = [
            group for file in found.get_fragments() for group in file.split_by_row_group()
        ]
        sizes = (group.row_groups[0].num_rows for group in self._groups)
        # Where each group begins, and where the last one ends.
        self._starts: list[int] = list(itertools.accumulate(sizes, initial=0))
        self._columns, self._batch_size = columns, batch_size

    def __len__(self) -> int:
        return -(-self._starts[-1] // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        import pyarrow

        start = index * self._batch_size
        end = min(start + self._batch_size, self._starts[-1])
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, end)
        names = keras.tree.flatten(self._columns)
        tables = [group.to_table(columns=names) for group in self._groups[first:last]]
        skip = start - self._starts[first]
        table = pyarrow.concat_tables(tables).slice(skip, end - start)
        arrays = {name: array_of(name, table[name].combine_chunks()) for name in names}
        return keras.tree.map_structure(lambda name: arrays[name], self._columns)
