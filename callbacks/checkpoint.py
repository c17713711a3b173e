"""Checkpoints by rank 0, never half written."""

import os
import pathlib
import tempfile
from typing import Any

import keras

from hvd_keras import agree, runtime


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
            self._on_rank_0(lambda: self._keras.on_train_batch_end(batch, logs))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """From Keras."""
        self._keras.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """For ``save_freq="epoch"``."""
        if self._keras.save_freq == "epoch":
            self._on_rank_0(lambda: self._keras.on_epoch_end(epoch, logs))

    def _on_rank_0(self, write: Any) -> None:
        error: Exception | None = None
        if runtime.rank() == 0:
            try:
                write()
            except Exception as caught:
                error = caught
        said = agree.gather_json("checkpoint", str(error) if error else None)[0]
        if error is not None:
            raise error
        if said is not None:
            raise RuntimeError(f"rank 0 could not write the checkpoint: {said}")


class _SavesWhole:
    """A model whose ``save`` and ``save_weights`` replace the file in one step."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, **kwargs: Any) -> None:
        _write_whole(filepath, lambda path: self._model.save(path, **kwargs))

    def save_weights(self, filepath: Any, **kwargs: Any) -> None:
        _write_whole(filepath, lambda path: self._model.save_weights(path, **kwargs))


def _write_whole(filepath: Any, write: Any) -> None:
    target = pathlib.Path(filepath)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        temporary = pathlib.Path(folder) / target.name  # Keras chooses the format by the ending
        write(temporary)
        _sync(temporary)
        temporary.replace(target)
    _sync(target.parent)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
