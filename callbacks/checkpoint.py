"""``ModelCheckpoint``: rank 0 writes, and an error reaches all ranks."""

import os
from typing import Any

from hvd_keras.callbacks.base import Callback

from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import keras


class ModelCheckpoint(Callback):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint`` for several ranks: the first one writes.

    Takes the same arguments. The first rank of the model's process set, usually rank 0, writes to a
    temporary file beside the target, syncs it to disk and renames it, as ``model.save`` does after
    ``hvd.init()``. So a crash at any time leaves the last checkpoint intact. If writing
    fails (a full disk), all ranks raise.

    With ``monitor``, put it after ``MetricAverageCallback``, so that it sees the metrics over all
    ranks.

    Args:
        filepath, args, kwargs: as in ``keras.callbacks.ModelCheckpoint``.

    Raises:
        ValueError, TypeError: as ``keras.callbacks.ModelCheckpoint``.
        OSError: (in ``fit``, on all ranks) the file cannot be written.

    Example:
        hvd.callbacks.ModelCheckpoint("checkpoints/{epoch:02d}.keras")
    """

    def __init__(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        # Created on all ranks, so that wrong arguments fail on all of them.
        self._keras = keras.callbacks.ModelCheckpoint(filepath, *args, **kwargs)
        self._epoch = 0

    def set_params(self, params: dict[str, Any]) -> None:
        """Called by Keras."""
        super().set_params(params)
        self._keras.set_params(params)

    def set_model(self, model: Any) -> None:
        """Called by Keras."""
        super().set_model(model)
        self._keras.set_model(model)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if ``save_freq`` is a number of batches."""
        if self._keras.save_freq == "epoch":
            return
        if self._keras._should_save_on_batch(batch):  # no communication otherwise
            agree.on_leader(
                "ModelCheckpoint",
                lambda: self._keras._save_model(epoch=self._epoch, batch=batch, logs=logs),
                self.process_set,
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if ``save_freq`` is "epoch"."""
        if self._keras.save_freq == "epoch":
            agree.on_leader(
                "ModelCheckpoint", lambda: self._keras.on_epoch_end(epoch, logs), self.process_set
            )
