"""``hvd.data`` on PyTorch: this rank's batches of arrays that every rank has as a whole."""

import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.backends.torch import fitting
from hvd_keras.rows import Split, order
from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["shard"]

_MODES = ("share", "trim", "error")


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    raise NotImplementedError(
        f"hvd.data.{name} needs Keras on TensorFlow, and KERAS_BACKEND is torch. On PyTorch there "
        "is hvd.data.shard of arrays and tensors."
    )


def shard(
    source: Any,
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    start_epoch: int = 0,
    uneven: str = "share",
    process_set: ProcessSet = global_process_set,
) -> torch.utils.data.DataLoader:
    """Return this rank's batches of a source that every rank has as a whole.

    Rows and their order are those of ``hvd.data.shard`` on TensorFlow: N ranks train like one
    process with batches of N * batch_size rows.

    Args:
        source: arrays or tensors ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, nested as for
            ``fit``, the same on every rank. Floating-point ones become ``floatx()``.
        batch_size: rows per rank and step.
        shuffle: whether to shuffle each epoch anew, by ``seed`` and the epoch's number.
        seed: a number, 0 or more.
        start_epoch: the number of the first epoch.
        uneven: what to do with an incomplete last step: "share" its rows equally among the ranks,
            leaving out a remainder of fewer rows than ranks; "trim" drops it; "error" raises.
        process_set: the ranks that train together.

    Returns:
        A ``torch.utils.data.DataLoader`` for ``fit``; each iteration is an epoch.

    Raises:
        NotImplementedError: (on all ranks) ``source`` or ``uneven`` needs Keras on TensorFlow.
        ValueError: (on all ranks) the ranks' sources or arguments differ, or cannot be used.
    """
    process_set.check_included("data.shard")
    split = Split(process_set.rank(), process_set.size(), uneven, False)

    def look() -> _Steps:
        if min(seed, start_epoch) < 0 or batch_size < 1:
            raise ValueError(f"{batch_size=}, {seed=}, {start_epoch=}, expected 1, 0, 0 or more.")
        if uneven not in _MODES:
            kind = NotImplementedError if uneven == "pad" else ValueError
            raise kind(f"{uneven=}, expected one of {', '.join(_MODES)} on PyTorch.")
        return _Steps(_arrays(source), batch_size, bool(shuffle), seed, split)

    steps = agree.on_all_ranks("hvd.data.shard", look, process_set)
    call = f"{steps.description}, {batch_size=}, {shuffle=}, {seed=}, {start_epoch=}, {uneven=}"
    views = agree.gather_if_different("hvd.data.shard sources", call, process_set)
    if views:
        raise ValueError(
            "hvd.data.shard: the ranks' sources or arguments differ. Give every rank the whole "
            f"data, in the same order: {agree.by_rank(views, process_set)}."
        )
    left_out = split.left_out(steps.rows, batch_size)
    if not len(steps) or (uneven == "error" and left_out):
        raise ValueError(
            f"hvd.data.shard: {steps.rows} rows do not fill steps of {split.size} ranks with "
            f"{batch_size} rows each: {left_out} would be left out. Use another batch_size, or "
            "uneven='share'."
        )
    return _Loader(steps, start_epoch)


def _arrays(source: Any) -> Any:
    """Return NumPy arrays for the parts of a source."""

    def array(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().numpy()
        if not hasattr(part, "__array__") or not getattr(part, "ndim", 0):
            raise NotImplementedError(
                f"got a {type(part).__name__}, expected arrays or tensors of rows. On PyTorch, "
                "hvd.data.shard takes no other sources: convert it, np.asarray(x), or give each "
                "rank a torch.utils.data.DataLoader with a DistributedSampler(dataset, hvd.size(), "
                "hvd.rank())."
            )
        part = np.asarray(part)
        return part.astype(keras.backend.floatx(), copy=False) if part.dtype.kind == "f" else part

    return keras.tree.map_structure(array, source)


class _Steps(torch.utils.data.Dataset):  # type: ignore[misc]
    """This rank's batches, by epoch and step."""

    def __init__(
        self, source: Any, batch_size: int, shuffle: bool, seed: int, split: Split
    ) -> None:
        self._source, self._parts = source, keras.tree.flatten(source)
        lengths = {len(part) for part in self._parts}
        if len(lengths) != 1:
            raise ValueError(f"got arrays of {sorted(lengths)} rows, expected one length.")
        (self.rows,) = lengths
        self._batch_size, self._shuffle, self._seed, self._split = batch_size, shuffle, seed, split
        crc = 0
        sample = np.linspace(0, self.rows - 1, min(self.rows, 9)).astype(int)
        for part in self._parts:
            crc = zlib.crc32(np.ascontiguousarray(part[sample]).tobytes(), crc)
        shapes = [f"{part.dtype}{list(part.shape)}" for part in self._parts]
        self.description = f"{' '.join(shapes)}, sample {crc:08x}"

    def __len__(self) -> int:
        return self._split.steps(self.rows, self._batch_size)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, step = place
        first = step * self._split.size * self._batch_size
        rows = min(self._split.size * self._batch_size, self.rows - first)
        places = self._split.places(first, rows, self._batch_size)
        numbers = order(self.rows, self._shuffle, self._seed, epoch)[places]
        parts = [torch.from_numpy(np.ascontiguousarray(part[numbers])) for part in self._parts]
        return keras.tree.pack_sequence_as(self._source, parts)


class _Loader(torch.utils.data.DataLoader):  # type: ignore[misc]
    """What ``fit`` takes: it neither shuffles nor divides a DataLoader."""

    def __init__(self, steps: _Steps, epoch: int) -> None:
        super().__init__(steps, batch_size=None)
        self.__dict__["_hvd_epoch"] = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self._hvd_epoch
        # Keras looks at a batch to build a model; that is no epoch.
        if not fitting.is_building.get():
            self.__dict__["_hvd_epoch"] += 1
        for step in range(len(self.dataset)):
            yield self.dataset[epoch, step]
