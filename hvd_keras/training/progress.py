"""Keeps how far a ``fit`` is, for hvdrun."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_keras import observe
from hvd_keras.runtime.keras import keras


def samples_of(model: Any, steps: int) -> float:
    """Return how many samples a model has trained on since its metrics were reset, or NaN."""
    # Keras's train_step weights the loss by the number of samples, so the loss metric's count is
    # their sum. If it equals the number of steps since then, a custom train_step may have omitted
    # the weight.
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    samples = np.nan if count is None else float(count)
    return samples if samples > steps else np.nan


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps how far a ``fit`` is, for ``hvdrun --stats`` and ``--metrics``.

    It looks at the loss and the number of samples once per second, because that waits for a GPU.

    Args:
        gpu_bytes: returns how much memory of its GPU this process uses, or None.
    """

    def __init__(self, gpu_bytes: Callable[[], int | None]) -> None:
        super().__init__()
        self._gpu_bytes = gpu_bytes
        self._next = 0.0
        self._tested = False  # metrics have been reset since the last training step
        self._steps = 0  # of this epoch
        self._before: dict[str, float] = {"steps": 0, "samples": 0}  # this epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        observe.training.clear()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        samples = observe.training.get("samples", 0)
        samples = np.nan if samples is None else samples
        self._before = {"steps": observe.training.get("steps", 0), "samples": samples}
        self._steps, self._tested = 0, False
        observe.training.update(epoch=epoch + 1, epochs=self.params["epochs"])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps = batch + 1
        if time.monotonic() >= self._next:
            self._keep(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._keep(None)
        self._tested = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._keep(logs)

    def _keep(self, logs: dict[str, Any] | None) -> None:
        now: dict[str, Any] = {"steps": self._before["steps"] + self._steps, "at": time.monotonic()}
        if not self._tested:  # afterwards the loss metric counts validation's samples
            samples = self._before["samples"] + samples_of(self.model, self._steps)
            now["samples"] = None if np.isnan(samples) else samples
        if logs and "loss" in logs:
            now["loss"] = float(logs["loss"])
        if (gpu_bytes := self._gpu_bytes()) is not None:
            now["gpu_bytes"] = gpu_bytes
        observe.training.update(now)
        self._next = time.monotonic() + observe.PERIOD
