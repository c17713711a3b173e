"""TFRecord files, with an index of where each record begins.

The index of ``part-0.tfrecord`` is ``.part-0.tfrecord.hvd-index`` beside it, an array of NumPy:
size and time of the file that was indexed, and a number for each record. It is mapped, not read,
into memory.
"""

import contextlib
import functools
import os
import pathlib
import secrets
import tokenize
import zipfile
from typing import Any

import numpy as np

from hvd_keras.data import reading
from hvd_keras.runtime import agree, libraries, objects
from hvd_keras.runtime.process_sets import ProcessSet

_BLOCK = 256  # records that lie together, so that a disk reads them together


class Records:
    """The records of several files, by number.

    Args:
        paths: in the order of their records.
        index: a folder for all indices; None: each beside its file.
        process_set: ranks that share the work of counting.
    """

    def __init__(self, paths: list[str], index: str | None, process_set: ProcessSet) -> None:
        self.paths, self._index = paths, index
        # Where an index cannot be written, it is kept here.
        self._held: dict[int, Any] = {}
        self._offsets = functools.lru_cache(1024)(self._open)  # open maps are limited
        # Each rank indexes some of the files; those whose index cannot be kept go to all.
        reading.look_into_some(len(paths), self._open, process_set)
        call: Any = {"name": "hvd.data.files held", "process_set": process_set}
        for theirs in objects.allgather_object(self._held, **call):
            self._held |= theirs

        def count() -> list[int]:
            return [len(self._offsets(number)) - 1 for number in range(len(paths))]

        counts = agree.on_all_ranks("hvd.data.files", count, process_set)
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.length = int(self._firsts[-1])
        names = [os.path.basename(path) for path in paths]
        digest = agree.digest(np.array([*names, *map(str, counts)]))
        self.description = f"{len(paths)} files {digest:016x}"

        # What look_up returns of each row.
        self.specs, self.row_bytes = [np.empty(0, np.int64)] * 3, 24.0
        # What read reads of one.
        size = sum(int(self._offsets(number)[-1]) for number in range(len(paths)))
        self.read_bytes = size / max(1, self.length)
        self.starts = np.array([*range(0, self.length, _BLOCK), self.length])

    def look_up(self, rows: Any) -> list[Any]:
        """Return for some rows the numbers of their files, their offsets there and lengths."""
        files = np.searchsorted(self._firsts, rows, "right") - 1
        offsets, ends = np.empty((2, len(rows)), np.int64)
        for number in np.unique(files):
            chosen = files == number
            within = rows[chosen] - self._firsts[number]
            starts = self._offsets(int(number))
            offsets[chosen], ends[chosen] = starts[within], starts[within + 1]
        return [files, offsets, ends - offsets]

    def read(self, places: list[Any]) -> Any:
        """Return the records at what ``look_up`` returned, as a tensor of strings."""
        files, offsets, lengths = places
        ops = libraries.tensorflow_ops()
        return ops.hvd_read_records(self.paths, files, offsets, lengths)

    def _open(self, number: int) -> Any:
        """Return where the records of a file begin, and where the last one ends."""
        if number in self._held:
            return self._held[number]
        path = pathlib.Path(self.paths[number])
        index = path.with_name(f".{path.name}.hvd-index")
        if self._index is not None:
            # Files of several folders may have the same name.
            name = agree.digest(np.array([str(path.absolute())]))
            index = pathlib.Path(self._index) / f"{name:016x}{index.name}"
        facts = path.stat()
        indexed = [facts.st_size, facts.st_mtime_ns]
        if (offsets := _load(index, indexed)) is None:
            offsets = np.asarray(libraries.tensorflow_ops().hvd_record_offsets(str(path)))
            if not _save(index, indexed, offsets):
                self._held[number] = offsets
        return offsets


def _load(index: pathlib.Path, indexed: list[int]) -> Any:
    """Return the offsets of an index; None if it is missing, damaged, or another file's."""
    # Read as another format, damaged bytes raise errors of that.
    errors = OSError, ValueError, EOFError, tokenize.TokenError, zipfile.BadZipFile
    with contextlib.suppress(*errors):
        found = np.load(index, mmap_mode="r")
        if found[:2].tolist() == indexed:
            return found[2:]
    return None


def _save(index: pathlib.Path, indexed: list[int], offsets: Any) -> bool:
    """Write an index, whole or not at all; return whether it was written."""
    temporary = index.with_name(f"{index.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            np.save(file, np.concatenate([indexed, offsets]))
        os.replace(temporary, index)
    except OSError:
        # A folder that may not be written, or a full disk: it is counted again next time.
        with contextlib.suppress(OSError):  # of a read-only disk this raises, too
            temporary.unlink()
        return False
    return True
