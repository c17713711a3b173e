"""Sources that give rows by number: Hugging Face ``datasets``, sources of ``grain`` and others."""

from typing import Any

import numpy as np

from hvd_keras.rows import reading
from hvd_keras.runtime.keras import flatten, pack

_BLOCK = 256  # rows that are likely to lie together
_CHECKED = 3  # rows by which ranks see whether they have the same


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
        self._columns = source.with_format("numpy") if hasattr(source, "with_format") else None
        self._source = source
        self.length = len(source)
        self.starts = np.array([*range(0, self.length, _BLOCK), self.length])
        self.specs: list[Any] = []
        if not self.length:
            return
        first = source[0] if self._columns is None else self._columns[0]
        self._like = reading.with_tuples(first)
        found = self._get(np.unique(np.linspace(0, self.length - 1, _CHECKED).astype(int)))
        self.specs = list(map(reading.like, found))
        self.row_bytes = sum(part.nbytes for part in found) / len(found[0])
        self.description = f"sample {reading.digest(found)}"

    def look_up(self, rows: Any) -> list[Any]:
        """Return the parts of some rows."""
        if not len(rows):
            return self.specs
        found = self._get(rows)
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

    def _get(self, rows: Any) -> list[Any]:
        if self._columns is not None:
            found = flatten(self._columns[rows.tolist()])
        else:
            # As many parts in each row as in the first.
            each = [flatten(self._source[int(row)]) for row in rows]
            found = [np.stack([np.asarray(p) for p in parts]) for parts in zip(*each, strict=True)]
        return list(map(reading.as_fit_casts, found))
