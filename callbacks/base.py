"""Base class of the callbacks: knows which ranks train the model. And ``ModelCheckpoint``."""

from typing import Any

from hvd_keras.gradients import model_ranks
from hvd_keras.runtime import process_sets
from hvd_keras.runtime.keras import keras
from hvd_keras.runtime.process_sets import ProcessSet


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that takes part on every rank of the model's process set."""

    # For a model without a distributed optimizer, whose train_step uses a DistributedGradientTape.
    _hvd_process_set: ProcessSet = process_sets.global_process_set

    def set_model(self, model: Any) -> None:
        """Called by Keras; registers the process set of a model without one."""
        super().set_model(model)
        if model is not None:
            model_ranks.together[model] = self._hvd_process_set

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train the model."""
        if self.model is None:
            return self._hvd_process_set
        return model_ranks.process_set_of(self.model) or self._hvd_process_set


class ModelCheckpoint(Callback, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint``; in ``fit`` on several ranks, the first one writes.

    In ``fit`` Keras's class does the same, if the model has a distributed optimizer. This one also
    marks a model without one, whose ``train_step`` uses a ``hvd.DistributedGradientTape``.

    The first rank of the model's process set, usually rank 0, writes to a temporary file beside the
    target, syncs it to disk and renames it, as ``model.save`` does after ``hvd.init()``. So a crash
    at any time leaves the last checkpoint intact. If writing fails (a full disk), all ranks raise.

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
