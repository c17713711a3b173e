"""Base class of the callbacks: knows which ranks train the model."""

from typing import Any

from hvd_keras.gradients import model_ranks
from hvd_keras.runtime import process_sets
from hvd_keras.runtime.keras import keras
from hvd_keras.runtime.process_sets import ProcessSet


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that takes part on every rank of the model's process set."""

    # For a model without a distributed optimizer, whose train_step uses a DistributedGradientTape.
    _hvd_process_set: ProcessSet = process_sets.global_process_set
    _params: dict[str, Any] | None = None

    @property
    def params(self) -> dict[str, Any]:
        """What ``fit`` knows of the training; empty in a ``CallbackList`` without parameters."""
        return self._params or {}

    @params.setter
    def params(self, params: dict[str, Any] | None) -> None:
        self._params = params

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train the model."""
        own = process_sets.ThisRank() if model_ranks.alone.get() else self._hvd_process_set
        return own if self.model is None else model_ranks.process_set_of(self.model) or own
