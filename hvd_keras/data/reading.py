"""Reads rows by number: of arrays, and of the batches of a ``keras.utils.PyDataset``."""

import contextlib
import functools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_keras.data.split import Split, order
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import PyDataset, keras, overrides
from hvd_keras.runtime.process_sets import ProcessSet

_SECONDS = 5  # between lines of progress


@dataclass
class Source:
    """An opened source of ``hvd.data.shard``."""

    split: Split
    description: str  # what else must be equal on all ranks
    is_shuffled: bool  # passes differ
    # Returns the parts of this rank's batch, and the weights for "pad", of the step of this epoch
    # whose first row is at this place of the epoch's order.
    read: Any = None
    workers: int = 1  # calls of ``read`` at a time
    spec: Any = None  # a type specification for each part of a row, or an example; lists are tuples
    # Reads the parts of x of some rows of which ``description`` has y alone; None: it has all.
    look: Callable[[], list[Any]] | None = None
    x: str = ""  # the digest of what that returned
    # On TensorFlow makes this rank's batches of the epoch of this number, from this row on: a
    # function of both, scalar int64 tensors, that returns a tf.data.Dataset of batches; for "pad",
    # of pairs (batch, weights), where weights are float32 of shape [batch_size] and 0 for padding.
    batches: Any = None
    counts: list[int] | None = None  # rows of its own batches, of which a rank gets one in a step
    unit: int = 1  # an epoch can begin at each row that this divides; 0: at none
    reads: bool = False  # those before it, then
    process_set: Any = None  # the ranks that it is divided among

    def __post_init__(self) -> None:
        split = self.split
        self.length, self.batch_size = split.length, split.batch_size
        self.global_batch = split.global_batch  # rows per step over all ranks
        self.steps, self.left_out = split.steps, split.left_out
        if self.counts is not None:
            self.steps, self.left_out = split.of_batches(self.counts)

    def read_step(self, epoch: int, row: int, step: int) -> Any:
        """Read a step of an epoch that begins at ``row``."""
        return self.read(epoch, row + step * self.global_batch)

    def read_steps(self, epoch: int, row: int) -> Iterator[tuple[Any, Any]]:
        """Read the steps of an epoch from ``row`` on, several at a time if it has workers."""
        steps = range(self.split.steps_from(row))
        read = functools.partial(self.read_step, epoch, row)
        if self.workers == 1:
            yield from map(read, steps)
            return
        with ThreadPoolExecutor(self.workers) as threads:
            ahead = [threads.submit(read, step) for step in steps[: self.workers]]
            for step in steps:
                if step + self.workers < len(steps):
                    ahead.append(threads.submit(read, step + self.workers))
                yield ahead.pop(0).result()


def numbered_rows_reader(
    take: Callable[[Any], Any],
    order_of: Callable[[int], Any],
    split: Split,
    description: str,
    is_shuffled: bool,
) -> Source:
    """Read rows by ``take(numbers)``, in the order ``order_of(epoch)``. A rank reads its own."""

    def read(epoch: int, first: int) -> tuple[Any, Any]:
        rows = min(split.global_batch, split.length - first)
        # Where the rows of this rank's batch are: [count], places beyond the end begin again.
        places = split.places(first, rows)
        weights = _weights(places < split.length, split.weight(rows))
        return take(order_of(epoch)[places % split.length]), weights

    return Source(split, description, is_shuffled, read)


def arrays_reader(parts: list[Any], split: Split) -> Source:
    """Read arrays of equally many rows, as ``fit`` casts them."""
    length = len(parts[0])
    sample = np.linspace(0, length - 1, min(length, 9)).astype(int)
    return numbered_rows_reader(
        lambda rows: [as_fit_casts(part[rows]) for part in parts],
        functools.partial(order, length, split.shuffles, split.seed),
        replace(split, length=length),
        f"sample {digest([part[sample] for part in parts])}",
        split.shuffles,
    )


def end_batches(source: Any) -> tuple[Any, Any]:
    """Return the first batch of a ``PyDataset`` and the last one, each read once."""
    if not (number := number_of_batches(source)):
        raise ValueError(f"the PyDataset has {number} batches, expected 1 or more.")
    first = source[0]
    return first, first if number == 1 else source[number - 1]


def pydataset_reader(source: Any, ends: tuple[Any, Any], flatten: Any, split: Split) -> Source:
    """Read a ``PyDataset``. A rank reads only its own batches, and its rows of the last step."""
    number = number_of_batches(source) or 0
    own = [n for n in ("on_epoch_begin", "on_epoch_end") if overrides(source, n, of=PyDataset)]
    if own and split.rank == 0:
        log.warn_once(
            f"hvd.data.shard does not call {' and '.join(own)} of {type(source).__name__}, so what "
            "these do, such as a shuffle, is left out. Let shuffle=True shuffle."
        )

    def parts_in(batch: Any) -> list[Any]:
        return parts_of(with_tuples(batch), flatten)

    batch_size, last = (len(parts_in(batch)[0]) for batch in ends)
    length = (number - 1) * batch_size + last
    split, whole = replace(split, length=length, batch_size=batch_size), length // batch_size

    def batch(epoch: int, index: int) -> list[Any]:
        if index < whole:
            index = int(order(whole, split.shuffles, split.seed, epoch)[index])
        parts = parts_in(source[index])
        rows = len(parts[0])
        if rows != min(batch_size, length - index * batch_size):
            text = f"batch {index} of the PyDataset has {rows} rows, the first had {batch_size}."
            raise ValueError(f"{text} Only the last may have fewer, the same number each time.")
        return parts

    def read(epoch: int, first: int) -> tuple[Any, Any]:
        rows = min(split.global_batch, length - first)
        if split.uneven == "share" and rows < split.global_batch:
            count = rows // split.size
            # Whole batches are read, so rows that follow each other cost the fewest reads.
            start = first + split.rank * count
            indices = range(start // batch_size, (start + count - 1) // batch_size + 1)
            batches = zip(*(batch(epoch, index) for index in indices), strict=True)
            skip = start % batch_size
            mine = [np.concatenate(parts)[skip : skip + count] for parts in batches]
            return mine, _weights(np.ones(count, bool), 1.0)
        place = first // batch_size + split.rank
        parts = batch(epoch, place % number)
        numbers, real = np.arange(batch_size), len(parts[0])
        weights = _weights((numbers < real) & (place < number), split.weight(rows))
        return [part[numbers % real] for part in parts], weights

    workers = max(1, getattr(source, "workers", 1))

    def look() -> list[Any]:
        with seeded():
            return x_of(end_batches(source), flatten)

    sample = f"sample {digest(y_of(ends, flatten))}"
    x = digest(x_of(ends, flatten))
    return Source(split, sample, split.shuffles, read, workers, None, look, x, unit=batch_size)


def number_of_batches(source: Any) -> int | None:
    """Return the length of a ``PyDataset``; None if it is infinite."""
    return getattr(source, "num_batches", None) if hasattr(source, "num_batches") else len(source)


def y_of(batches: Iterable[Any], flatten: Any) -> list[Any]:
    """The parts of y, because augmentation does not change it; those of x if there is no y."""
    pairs = [keras.utils.unpack_x_y_sample_weight(batch)[:2] for batch in batches]
    return [part for x, y in pairs for part in flatten(x if y is None else y)]


def x_of(batches: Iterable[Any], flatten: Any) -> list[Any]:
    """The parts of x."""
    pairs = map(keras.utils.unpack_x_y_sample_weight, batches)
    return [np.asarray(part) for x, *_ in pairs for part in flatten(x)]


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Let Python's and NumPy's global random numbers be the same on all ranks for a while."""
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def digest(parts: list[Any]) -> str:
    """Return a short text that is equal if the arrays are equal."""
    found = 0
    for part in parts:
        found = agree.digest(part, found)
    return f"{found:016x}"


def mixed(*numbers: int) -> int:
    """Make one seed of several numbers."""
    return int(np.random.default_rng(numbers).integers(2**31 - 1))


def fetched(dataset: Any, collate: Callable[[Any], Any], numbers: Any) -> Any:
    """Return a batch of row numbers; called where a DataLoader's workers run."""
    rows = list(map(int, numbers))
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(rows))
    return collate([dataset[row] for row in rows])


def _weights(real: Any, weight: float) -> Any:
    return np.where(real, weight, 0).astype(np.float32)


def parts_of(source: Any, flatten: Any) -> list[Any]:
    """Return nested arrays as a flat list. Raises ValueError if they are no rows."""
    parts = [_as_fit_shapes(part) for part in flatten(source)]
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
    return parts


def _as_fit_shapes(part: Any) -> Any:
    """Return an array as ``fit`` makes it: a ``pandas.Series`` of n rows is one of shape [n, 1]."""
    array = np.asarray(part)
    columns = part.dtypes if hasattr(part, "columns") else []
    if array.dtype == object and len(columns) and all(dtype.kind in "biuf" for dtype in columns):
        array = np.asarray(part, agree.numpy_dtype(keras.backend.floatx()))  # bools and floats
    return array[:, np.newaxis] if array.ndim == 1 and hasattr(part, "to_frame") else array


def like(array: Any) -> Any:
    """Return an array without rows, of the dtype and shape of an array's rows."""
    return np.empty((0, *array.shape[1:]), object if array.dtype.kind in "OUS" else array.dtype)


def as_fit_casts(array: Any) -> Any:
    """Return the array with the dtype to which Keras's ``fit`` casts it."""
    if array.dtype.kind == "U":  # which TensorFlow takes for ASCII
        return array.astype(object)
    floatx = agree.numpy_dtype(keras.backend.floatx())
    is_floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return array.astype(floatx, copy=False) if is_floating else array


def with_tuples(source: Any) -> Any:
    """Nested arrays with tuples for lists, as specifications have them."""
    if isinstance(source, dict):
        return type(source)((key, with_tuples(part)) for key, part in source.items())
    if isinstance(source, (list, tuple)) and not hasattr(source, "_fields"):
        return tuple(map(with_tuples, source))
    return source


def look_into_some(files: int, look: Callable[[int], None], process_set: ProcessSet) -> None:
    """Call ``look(number)`` for this rank's part of so many files; raise an error on all ranks."""
    mine = range(process_set.rank(), files, process_set.size())

    def look_into_mine() -> None:
        begun = told = time.monotonic()
        for done, number in enumerate(mine):
            look(number)
            if process_set.rank() == 0 and time.monotonic() - told > _SECONDS:
                told = time.monotonic()
                print(
                    f"hvd.data.files counts rows: {done + 1} of {len(mine)} files of rank 0 after "
                    f"{told - begun:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

    agree.on_all_ranks("hvd.data.files", look_into_mine, process_set)
