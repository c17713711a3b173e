"""``hvd.spark.shard``: the rows of a DataFrame, written once, read by the ranks."""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Rows:
    """Rows in a folder of Parquet files that ``hvd.spark.shard`` has written.

    Attributes:
        path: the folder, as an absolute path or a URI.
        columns: nested names of columns.
        batch_size: rows per rank and step.
    """

    path: str
    columns: Any
    batch_size: int

    def dataset(self, **options: Any) -> tf.data.Dataset:
        """Return this rank's batches; to be called on all ranks, after ``hvd.init()``.

        Args:
            options: those of ``hvd.data.shard`` of files, which this calls: ``shuffle``, ``seed``,
                ``start_epoch``, ``uneven``, ``evaluation``, ``process_set``.

        Returns:
            A ``tf.data.Dataset`` of batches nested as ``columns``, of shape [rows, ...]: equally
            many on all ranks. In an epoch each row is on one rank; ``uneven`` says what happens to
            an incomplete last step.

        Raises:
            ValueError: (on all ranks) the folder cannot be read, or a column has nulls, rows of
                different lengths, or a type that is neither number, string nor array of numbers.
        """
        from hvd_keras.data.row_files import Folder
        from hvd_keras.data.tensorflow import sharding

        folder = Folder(self.path, self.columns, None, False, None)
        return sharding.shard(folder, batch_size=self.batch_size, **options)


def shard(
    df: Any,
    columns: Any,
    batch_size: int,
    *,
    path: str | os.PathLike[str],
    seed: int | None = 0,
) -> Rows:
    """Write a DataFrame's columns once, as Parquet files from which ranks read their rows.

    To be called on the driver. What it returns can be passed to the function of ``hvd.spark.run``.
    Each row group has the rows of one batch, so a rank reads its own rows only.

    Args:
        df: a ``pyspark.sql.DataFrame``.
        columns: names of columns, nested as ``fit`` takes its data: ``("features", "label")``, or
            ``({"a": "a", "b": "b"}, "label", "weight")``. Vectors of Spark ML become arrays.
        batch_size: rows per rank and step.
        path: a new folder that the driver and all executors share: an absolute path or a URI.
        seed: rows are written in a random order with this seed; None: in that of ``df``.

    Returns:
        The ``Rows``, whose ``dataset()`` is for the ranks.

    Raises:
        ValueError: a column is missing, ``batch_size`` is less than 1, or ``path`` exists or is
            relative.

    Example:
        rows = hvd.spark.shard(df, ("features", "label"), batch_size=32, path="/shared/rows")

        def train():
            hvd.init()
            ...
            model.fit(rows.dataset(), epochs=5, shuffle=False)

        hvd.spark.run(train, num_proc=4)
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions

    path = os.fspath(path)
    names = list(dict.fromkeys(_names(columns)))
    missing = [name for name in names if name not in df.columns]
    if missing or not names or batch_size < 1:
        raise ValueError(
            f"hvd.spark.shard: {columns=}, {batch_size=}; expected names of {df.columns}, nested "
            "in tuples and dicts, and 1 or more rows per rank and step"
        )
    if "://" not in path and not posixpath.isabs(path):
        raise ValueError(
            f"hvd.spark.shard: {path=}; expected an absolute path or a URI that driver and "
            "executors share"
        )
    chosen = df.select(*(_plain(df, name) for name in names))
    if seed is not None:
        chosen = chosen.orderBy(functions.rand(seed))
    uri = path if "://" in path else f"file://{path}"
    try:
        chosen.write.option("parquet.block.row.count.limit", batch_size).parquet(uri)
    except AnalysisException as error:
        raise ValueError(
            f"hvd.spark.shard: {path=} cannot be written: {error}; expected a new folder"
        ) from error
    return Rows(path, columns, batch_size)


def _names(columns: Any) -> list[str]:
    if isinstance(columns, str):
        return [columns]
    parts = columns.values() if isinstance(columns, dict) else columns
    return [name for part in parts for name in _names(part)]


def _plain(df: Any, name: str) -> Any:
    """Return the column, as an array if it is a vector of Spark ML."""
    quoted = name.replace("`", "``")
    column = df[f"`{quoted}`"]  # else a dot stands before the name of a field
    if type(df.schema[name].dataType).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column, "float32").alias(name)
    return column
