"""``hvd.data`` on PyTorch: this rank's batches of a source that every rank has as a whole."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from hvd_keras.data import reading, sources
from hvd_keras.data import row_files as of_files
from hvd_keras.data.reading import Source
from hvd_keras.data.row_files import files as files
from hvd_keras.data.sources import Passes
from hvd_keras.data.split import Split, order
from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.training import sampled_rows

__all__ = ["agree_on_steps", "files", "shard"]


def shard(
    source: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | int | None = None,
    seed: int = 0,
    start_epoch: int = 0,
    uneven: str | None = None,
    evaluation: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this rank's batches of a source that every rank has as a whole.

    Rows and their order are those of ``hvd.data.shard`` on TensorFlow: N ranks train like one
    process with batches of N * batch_size rows.

    Args:
        source: the same on every rank; one of

            - arrays or tensors ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, nested as for
              ``fit``. Floating-point ones become ``floatx()``.
            - a ``torch.utils.data.DataLoader`` with a batch_size: its batches are one rank's. Its
              dataset, sampler, collate_fn and workers are used. A sampler of your own is run on
              each rank, with torch's random generators seeded by ``seed`` and the epoch's number.
            - a ``torch.utils.data.Dataset``, or another object with a length and rows by number.
            - a ``keras.utils.PyDataset``, a ``tf.data.Dataset``, and Parquet files from
              ``hvd.data.files``, as on TensorFlow.
        batch_size: rows per rank and step; not for a DataLoader and a PyDataset.
        shuffle: whether to shuffle each epoch anew, by ``seed`` and the epoch's number. Default:
            as a DataLoader's sampler does; else True.
        seed, start_epoch, uneven, evaluation, process_set: as on TensorFlow. The default of
            ``uneven`` is "trim" for a DataLoader with drop_last=True, and else "share".

    Returns:
        A ``torch.utils.data.DataLoader`` for ``fit``; each iteration is an epoch.

    Raises:
        NotImplementedError: (on all ranks) the source cannot be read by row numbers.
        ValueError: (on all ranks) the ranks' sources or arguments differ, or cannot be used.
    """
    options = {name: value for name, value in locals().items() if name != "source"}
    process_set.check_included("data.shard")
    source = of_files.opened(source, _refuse_records, process_set)
    tf: Any = sys.modules.get("tensorflow")
    if tf is not None and isinstance(source, tf.data.Dataset):
        stream = _Stream(source, options)
        loader = DataLoader(stream, batch_size=None, collate_fn=_same)
        loader.passes = stream.passes
        return loader
    mode = uneven or ("trim" if getattr(source, "drop_last", False) else "share")
    rank, ranks = process_set.rank(), process_set.size()
    split = Split(rank, ranks, batch_size, shuffle, seed, mode, evaluation)

    def look() -> tuple[Source, Any, dict[str, Any]]:
        sources.check_arguments(split, start_epoch)
        return _open(source, split)

    rows, spec, loading = agree.on_all_ranks("hvd.data.shard", look, process_set)
    rows.spec = spec
    given = f"{batch_size=}, {shuffle=}, {seed=}, {start_epoch=}, {uneven=}, {evaluation=}"
    sources.check_source(rows, given, process_set)
    return Loader(Passes(start_epoch, None, rows), seed, **loading)


def _refuse_records(paths: list[str], *_: Any) -> Any:
    raise NotImplementedError(
        f"hvd.data.files: got {paths[0]}, expected .parquet files: TFRecord files need Keras on "
        "TensorFlow. Write the rows with pyarrow.parquet, or give hvd.data.shard a Dataset of them."
    )


def agree_on_steps(
    source: Any, *, uneven: str = "trim", process_set: ProcessSet = global_process_set
) -> int:
    """Do what it does on TensorFlow; ``source`` may be a ``torch.utils.data.DataLoader``."""

    def length(source: Any) -> Any:
        return len(source) if isinstance(source, DataLoader) else source

    return sources.steps(source, length, "a DataLoader", uneven, process_set)


def _open(source: Any, split: Split) -> tuple[Source, Any, dict[str, Any]]:
    """Return an opened source, the description of a row, and how a ``Loader`` loads it."""
    batch_size = split.batch_size
    if isinstance(source, (keras.utils.PyDataset, DataLoader)) and batch_size is not None:
        raise ValueError(f"{batch_size=}, expected none for a {type(source).__name__}.")
    if isinstance(source, keras.utils.PyDataset):
        ends = reading.end_batches(source)
        first, flatten = reading.with_tuples(ends[0]), keras.tree.flatten
        reader = reading.pydataset_reader(source, ends, flatten, split)
        return reader, _spec(first), {"pack": functools.partial(_packed, first)}
    if isinstance(source, DataLoader):
        return _of_loader(source, split)
    if batch_size is None:
        raise ValueError("batch_size=None, expected rows per rank and step, as in batch_size=32.")
    if isinstance(source, of_files.Opened):
        reader = of_files.reader(source, split)
        pack = functools.partial(_mapped, source)
        sample = pack(reader.read(0, 0)[0])
        return reader, _spec(sample), {"pack": pack}
    is_nest = isinstance(source, (list, tuple, dict)) or hasattr(source, "__array__")
    if not is_nest and hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        kinds: Any = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
        sampler = kinds[0 if split.shuffles else 1](source)
        loader = DataLoader(source, batch_size, sampler=sampler)
        return _of_loader(loader, split)
    source = reading.with_tuples(source)
    parts = reading.parts_of(_arrays(source), list)
    reader = reading.arrays_reader(parts, split)
    return reader, _spec(source), {"pack": functools.partial(_packed, source)}


_OR_EACH_ITS_OWN = "or give each rank its own rows, and fit hvd.data.agree_on_steps(steps)."


def _array(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return keras.ops.convert_to_numpy(part)
    if not hasattr(part, "__array__"):
        raise NotImplementedError(
            f"got a {type(part).__name__}, expected arrays, tensors, or a source with rows by "
            f"number. Make a map-style torch.utils.data.Dataset of it, {_OR_EACH_ITS_OWN}"
        )
    return np.asarray(part)


def _arrays(nested: Any) -> list[Any]:
    return list(map(_array, keras.tree.flatten(nested)))


def _spec(source: Any) -> Any:
    found = [f"{part.dtype}{[*part.shape[1:]]}" for part in _arrays(source)]
    return keras.tree.pack_sequence_as(source, found)


def _tensor(part: Any) -> Any:
    part = np.asarray(part)
    if part.dtype.kind in "OUS":  # text
        return part
    return torch.from_numpy(np.require(part, None, ["C", "W"]))  # this rank's alone


def _packed(like: Any, parts: list[Any]) -> Any:
    return keras.tree.pack_sequence_as(like, list(map(_tensor, parts)))


def _mapped(source: of_files.Opened, parts: list[Any]) -> Any:
    """Return what ``map`` makes of the columns of a batch, which seeds may follow."""
    columns, seeds = (parts[:-1], parts[-1:]) if source.seeds else (parts, [])
    batch = keras.tree.map_structure(_tensor, source.rows.read(columns))
    return source.map(batch, *map(_tensor, seeds)) if source.map is not None else batch


def _of_loader(loader: DataLoader, split: Split) -> tuple[Source, Any, dict[str, Any]]:
    shuffle, seed = split.shuffle, split.seed
    dataset, sampler, kinds = loader.dataset, loader.sampler, torch.utils.data
    if isinstance(dataset, kinds.IterableDataset) or loader.batch_size is None:
        raise NotImplementedError(
            "got a DataLoader of an IterableDataset or with a batch_sampler, whose rows have no "
            f"numbers that ranks could share. Use a map-style dataset with batch_size, "
            f"{_OR_EACH_ITS_OWN}"
        )
    if isinstance(sampler, kinds.DistributedSampler):
        raise ValueError(
            "the DataLoader's DistributedSampler gives each rank a part already, and "
            "hvd.data.shard needs the whole: leave the sampler out, DataLoader(dataset, "
            "batch_size, shuffle=True)."
        )
    if (shuffles := shuffles_all(loader)) is not None:
        is_shuffled, length = shuffles if shuffle is None else bool(shuffle), len(dataset)
        order_of: Callable[[int], Any] = functools.partial(order, length, is_shuffled, seed)
        drawn = ""
    else:
        if shuffle is not None:
            raise ValueError(f"{shuffle=}, expected none: the DataLoader's sampler decides.")
        is_shuffled, length = True, len(_drawn(sampler, seed, 0))
        order_of = functools.lru_cache(2)(functools.partial(_drawn_again, sampler, length, seed))
        drawn = f", order {reading.digest([order_of(0)])}"
    if not length:
        raise ValueError("the DataLoader has no rows.")
    row = loader.collate_fn([dataset[int(order_of(0)[0])]])
    split = replace(split, length=length, batch_size=loader.batch_size)
    sample = f"sample {reading.digest(reading.y_of([row], _arrays))}{drawn}"
    reader = reading.numbered_rows_reader(lambda rows: rows, order_of, split, sample, is_shuffled)
    reader.x = reading.digest(reading.x_of([row], _arrays))
    reader.look = lambda: sampled_rows.undisturbed(lambda: samples(loader)[0])
    pack = functools.partial(reading.fetched, dataset, loader.collate_fn)
    return reader, _spec(row), {"pack": pack, **_loading(loader)}


def shuffles_all(loader: DataLoader) -> bool | None:
    """Whether a DataLoader shuffles all rows; None: it may not give each of them once."""
    sampler = loader.sampler
    kinds = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
    is_known = loader.batch_size is not None and isinstance(sampler, kinds)
    is_known = is_known and not getattr(sampler, "replacement", False)
    has_all = is_known and len(sampler) == len(loader.dataset)
    return isinstance(sampler, kinds[0]) if has_all else None


def _loading(loader: DataLoader) -> dict[str, Any]:
    """How a DataLoader loads, for another one."""
    names = ["num_workers", "pin_memory", "timeout", "multiprocessing_context"]
    names += ["prefetch_factor", "persistent_workers"] if loader.num_workers else []
    init = sampled_rows.init_of(loader.worker_init_fn, loader.dataset, get_worker_info)
    return {"worker_init_fn": init} | {name: getattr(loader, name) for name in names}


def samples(loader: DataLoader) -> list[Any]:
    """Read for ``sampled_rows.described`` in a worker, if rows are read in workers."""
    by_seed, options = sampled_rows.batch_by_seed, _loading(loader)
    pack = functools.partial(by_seed, torch.manual_seed, loader.dataset, loader.collate_fn)
    options |= {"num_workers": min(1, loader.num_workers), "generator": torch.Generator()}
    options |= {"sampler": [(seed, None) for seed in sampled_rows.SEEDS], "collate_fn": _same}
    return list(map(_arrays, DataLoader(_Batches(pack, False, 2), batch_size=None, **options)))


def _drawn(sampler: Any, seed: int, epoch: int) -> Any:
    """Return the row numbers of a sampler in an epoch, which torch's generators decide."""
    mixed = reading.mixed(seed, epoch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed)
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(mixed)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return np.fromiter(sampler, np.int64)


def _drawn_again(sampler: Any, length: int, seed: int, epoch: int) -> Any:
    found = _drawn(sampler, seed, epoch)
    if len(found) != length or not np.array_equal(found, _drawn(sampler, seed, epoch)):
        raise ValueError(
            f"the sampler {type(sampler).__name__} gives other rows each time, so the ranks would "
            "have different ones. Let it draw by torch's global generator or by its attribute "
            "`generator`, which hvd.data.shard seeds, and always equally many."
        )
    return found


class _Batches(torch.utils.data.Dataset):  # type: ignore[misc]
    """Batches, by what has been read for them."""

    def __init__(self, pack: Callable[[Any], Any], pads: bool, steps: int) -> None:
        self._pack, self._pads, self._steps = pack, pads, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, read: tuple[Any, Any]) -> Any:
        parts, weights = read
        data = self._pack(parts)
        return _weighed(data, torch.from_numpy(weights)) if self._pads else data


def _weighed(data: Any, factors: torch.Tensor) -> Any:
    """Add sample weights: ``factors``, times the data's own weights."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)

    def weigh(own: torch.Tensor) -> torch.Tensor:
        return own.to(factors.dtype) * factors.reshape([-1] + [1] * (own.dim() - 1))

    return x, y, factors if weights is None else keras.tree.map_structure(weigh, weights)


class _Steps(torch.utils.data.Sampler):  # type: ignore[misc]
    """What is read in the steps of a pass."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def __len__(self) -> int:
        return self._passes.source.steps

    def __iter__(self) -> Iterator[Any]:
        # Keras looks at a batch to build a model; that is no epoch.
        is_look = agree.is_building.get()
        epoch, row = (self._passes.next, 0) if is_look else self._passes.begin()
        yield from self._passes.source.read_steps(epoch, row)


class Loader(DataLoader):  # type: ignore[misc]
    """What ``fit`` takes: it neither shuffles nor divides a DataLoader."""

    #: None takes the place of each batch that is not read.
    yields_unread = True

    def __init__(self, passes: Passes, seed: int, pack: Any, **options: Any) -> None:
        batches = _Batches(pack, passes.source.split.uneven == "pad", passes.source.steps)
        options |= {"sampler": _Steps(passes), "generator": torch.Generator()}
        super().__init__(batches, batch_size=None, collate_fn=_same, **options)
        self.passes, self._seed, self._unread = passes, seed, 0

    def seek(self, row: int) -> int:
        """Let the next pass begin at ``row``; return the steps before, which yield nothing."""
        self._unread = self.passes.seek(row)
        return self._unread

    def __iter__(self) -> Iterator[Any]:
        unread = 0
        if not agree.is_building.get():
            unread, self._unread = self._unread, 0
        yield from [None] * unread
        if unread < len(self):
            # Of the workers, whose random numbers are this rank's, and the same in a rerun.
            rank = self.passes.source.split.rank
            self.generator.manual_seed(reading.mixed(self._seed, self.passes.next, rank))
            yield from super().__iter__()


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """The batches of a sharded ``tf.data.Dataset``."""

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        sharding = importlib.import_module("hvd_keras.data.tensorflow.sharding")
        self._batches = sharding.shard(source, **options)
        (self.passes,) = sharding.passes_of(self._batches)
        self._sample()  # refuses what torch has no tensors for

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if agree.is_building.get():  # which is no pass
            yield self._sample()
            return
        for batch in self._batches:
            yield keras.tree.map_structure(_tensor, batch)

    def _sample(self) -> Any:
        def zeros(spec: Any) -> Any:
            if type(spec).__name__ != "TensorSpec" or spec.shape.rank is None:
                raise NotImplementedError(f"got {spec}, expected dense tensors of a known rank.")
            return _tensor(np.zeros([n or 1 for n in spec.shape], spec.dtype.as_numpy_dtype))

        return keras.tree.map_structure(zeros, self._batches.element_spec)


def _same(data: Any) -> Any:
    return data
