"""``StatsLogger``: communication statistics in TensorBoard."""

import importlib.util
import os
from typing import Any

from hvd_keras.callbacks.base import Callback

from hvd_keras import observe


class StatsLogger(Callback):  # type: ignore[misc]
    """Writes ``hvd.stats()`` of each epoch for TensorBoard, on the first rank of the process set.

    Scalars under ``hvd/``: ``waiting_seconds``, ``moving_seconds``, ``requests`` and ``bytes`` of
    this rank, summed over the collectives. For each rank, under ``hvd/rank_1`` and so on:
    ``awaited_seconds``, the time that the others waited for it, ``last``, how many times it came
    last, and ``straggler``, the share of the epoch in which the others waited for it, from 0 to 1.
    All numbers are per epoch. A rank that the others wait for in every epoch has more work, or a
    slower machine.

    It does not communicate. Pass it to ``fit`` on every rank, or only on the one that writes.

    Args:
        log_dir: the folder, such as that of ``keras.callbacks.TensorBoard``, whose run ``train``
            then has these plots beside the loss; only used on the rank that writes.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "hvd.callbacks.StatsLogger needs tensorboard. Run: pip install tensorboard"
            )
        self._log_dir = os.path.join(os.fspath(log_dir), "train")
        self._writer: Any = None
        self._before: dict[str, float] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.process_set.rank() == 0:
            from tensorboard.summary import Writer

            self._writer = Writer(self._log_dir)
            self._before = _numbers(observe.stats())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._writer is None:
            return
        numbers = _numbers(observe.stats())
        changes = {name: number - self._before.get(name, 0) for name, number in numbers.items()}
        seconds = changes.pop("seconds")
        for name in [name for name in changes if name.endswith("/awaited_seconds")]:
            # The share of the epoch; times of an earlier one may be counted in it, hence the limit.
            straggler = name.replace("awaited_seconds", "straggler")
            changes[straggler] = min(changes[name] / seconds, 1.0)
        for name, change in changes.items():
            self._writer.add_scalar(f"hvd/{name}", change, step=epoch)
        self._writer.flush()
        self._before = numbers

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _numbers(stats: dict[str, Any]) -> dict[str, float]:
    """Return the time, the sums over all collectives, and each rank's lateness."""
    numbers = {
        name: sum(kind[name] for kind in stats["collectives"].values())
        for name in ("requests", "bytes", "waiting_seconds", "moving_seconds")
    }
    numbers["seconds"] = stats["seconds"]
    for rank, late in enumerate(stats["ranks"]):
        numbers |= {f"rank_{rank}/{name}": number for name, number in late.items()}
    return numbers
