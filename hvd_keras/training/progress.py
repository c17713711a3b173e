"""Keeps how far a ``fit`` is, for hvdrun; says at the end if one process would be as fast."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_keras import observe
from hvd_keras.runtime import log
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


# A shorter fit, or epoch, is not worth a word.
_SECONDS = 10.0
_STEPS = 20


class Payoff(keras.callbacks.Callback):  # type: ignore[misc]
    """Says at the end of a ``fit`` on several ranks if one process would be as fast.

    A step without the exchange of gradients is what one process computes for the rows of one rank.
    For those of all ranks it takes about as many times as long: its host has as many cores.

    Args:
        size: the number of ranks.
    """

    _supports_tf_logs = True  # it reads none

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._begin = 0.0  # of the fit, seconds
        # Of an epoch: the time and all exchange after its first step, and the number of that.
        self._since: tuple[float, float, int] | None = None
        self._last = (0.0, 0)  # time and number of the last step
        self._text = ""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._begin, self._text = time.perf_counter(), ""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._last = time.perf_counter(), batch
        if self._since is None:
            self._since = self._last[0], _exchanging(), batch

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._measure()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._measure()

    def _measure(self) -> None:
        if self._since is None:  # measured before validation
            return
        (begin, exchanged, first), (end, last) = self._since, self._last
        self._since, self._text, steps = None, "", last - first
        if steps < _STEPS:
            return
        step = (end - begin) / steps
        exchange = min(step, (_exchanging() - exchanged) / steps)
        alone = self._size * (step - exchange)
        if alone < step:
            self._text = (
                f"{self._size} ranks take {step * 1e3:.1f} ms a step, {exchange * 1e3:.1f} of them "
                "for the exchange of gradients; one process takes about "
                f"{alone * 1e3:.1f} for the same rows. Larger batches or models make several ranks "
                "pay (docs/performance.md)."
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._text and time.perf_counter() - self._begin > _SECONDS:
            log.logger.warning(self._text)


def _exchanging() -> float:
    """Seconds that this process has waited for others' tensors, or moved them."""
    kinds = observe.stats()["collectives"].values()
    return float(sum(kind["waiting_seconds"] + kind["moving_seconds"] for kind in kinds))
