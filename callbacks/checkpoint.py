"""Checkpoints by rank 0, never half written."""

import os
from collections.abc import Callable
from typing import Any

from hvd_keras import agree, checkpoint, rank_info
from hvd_keras._keras import keras


class ModelCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint`` on rank 0, for all ranks.

    Takes the same arguments. Rank 0 writes to a temporary file beside the target and renames it
    when it is complete and on the disk, so that a crash at any time leaves the last checkpoint
    whole. An error of writing (a full disk) is raised on all ranks.

    With ``monitor``, put it behind ``MetricAverageCallback``, to choose by all ranks' metrics.

    Raises:
        RuntimeError: (in ``fit``, on the other ranks) rank 0 could not write; there the error
            itself is raised.

    Example:
        hvd.callbacks.ModelCheckpoint("checkpoints/{epoch:02d}.keras")
    """

    def __init__(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        # Made on all ranks, so that wrong arguments fail on all.
        self._keras = keras.callbacks.ModelCheckpoint(filepath, *args, **kwargs)

    def set_params(self, params: dict[str, Any]) -> None:
        """From Keras."""
        super().set_params(params)
        self._keras.set_params(params)

    def set_model(self, model: Any) -> None:
        """From Keras."""
        super().set_model(model)
        self._keras.set_model(_SavesWhole(model))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """For a ``save_freq`` in batches."""
        if self._keras.save_freq != "epoch":
            on_rank_0(lambda: self._keras.on_train_batch_end(batch, logs))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """From Keras."""
        self._keras.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """For ``save_freq="epoch"``."""
        if self._keras.save_freq == "epoch":
            on_rank_0(lambda: self._keras.on_epoch_end(epoch, logs))


class _SavesWhole:
    """A model whose ``save`` and ``save_weights`` replace the file in one step."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, **kwargs: Any) -> None:
        checkpoint.write_whole(filepath, lambda path: self._model.save(path, **kwargs))

    def save_weights(self, filepath: Any, **kwargs: Any) -> None:
        checkpoint.write_whole(filepath, lambda path: self._model.save_weights(path, **kwargs))


def on_rank_0(write: Callable[[], None]) -> None:
    """Lets rank 0 write, and all ranks know of it.

    Raises:
        RuntimeError: (on the other ranks) rank 0 could not write; there the error itself is raised.
    """
    error: Exception | None = None
    if rank_info.rank() == 0:
        try:
            write()
        except Exception as caught:
            error = caught
    text = f"{type(error).__name__}: {error}" if error else None
    said = agree.gather_json("checkpoint", text)[0]
    if error is not None:
        raise error
    if said is not None:
        raise RuntimeError(f"rank 0 could not write the checkpoint: {said}")
