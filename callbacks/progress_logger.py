"""``ProgressLogger``: one progress bar for all ranks."""

import sys
import time
from typing import Any

import numpy as np
from hvd_keras.callbacks.base import Callback

from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import is_legacy, keras
from hvd_keras.training import progress


class ProgressLogger(Callback, keras.callbacks.ProgbarLogger):  # type: ignore[misc]
    """Keras's progress bar on rank 0, with the samples per second of all ranks.

    In a terminal it is a moving bar; elsewhere (a file, a pipe, ``hvdrun``) one line per epoch::

        Epoch 2/40: 23/23 - 0s - 15ms/step - 11938 samples/s - loss: 0.0186 - val_loss: 0.0394

    ``fit`` uses it instead of its own bar, whatever ``verbose`` is passed to ``fit``; the other
    ranks print nothing.

    The rate counts the samples that the ranks have trained on, so ranks and batches may have
    different sizes. The ranks add them up once per epoch. The time is that of training, without
    validation; in the first epoch it includes tracing. While an epoch runs, the bar shows rank 0's
    own metrics, and a rate that is estimated from the number of samples of the epoch before. If a
    rank cannot count its samples, the bar shows ``steps/s``: with a custom ``train_step`` that does
    not weight the loss by the number of samples as Keras's does, and with batches of one sample,
    which cannot be told apart from that.

    Pass it to all ranks, after ``MetricAverageCallback``, so that the epoch's metrics are those of
    all ranks.

    Args:
        verbose: 1 for the bar, 2 for one line per epoch. Default: 1 in a terminal, otherwise 2.

    Raises:
        ValueError: ``verbose`` has another value, or tf_keras is in use.

    Example:
        average, progress = hvd.callbacks.MetricAverageCallback(), hvd.callbacks.ProgressLogger()
        model.fit(data, callbacks=[average, progress])
    """

    _hvd_communicates = True

    def __init__(self, verbose: int | None = None) -> None:
        if is_legacy:
            raise ValueError(
                "ProgressLogger needs Keras 3, but tf_keras is in use (TF_USE_LEGACY_KERAS). "
                "Use fit(verbose=hvd.rank() == 0) instead."
            )
        super().__init__()
        self.verbose: int | None = None  # until parameters are set
        if verbose not in (None, 1, 2):
            raise ValueError(f"ProgressLogger: verbose is {verbose!r}, expected None, 1 or 2.")
        self._verbose = verbose
        self._steps: int | None = None  # batches in an epoch, if known
        self._start = 0.0
        self._seconds = 0.0
        self._first: int | None = None  # batch of this epoch here; others are before a restart
        # Of this rank in this epoch; None until its last batch has ended.
        self._samples: float | None = None
        # Of all ranks in the last epoch; None if a rank cannot count its samples.
        self._samples_per_step: float | None = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if self.verbose is None:  # a CallbackList of the script may have no parameters
            self.set_params({"epochs": None, "steps": None})

    def set_params(self, params: dict[str, Any]) -> None:
        verbose = self._verbose or (1 if sys.stdout.isatty() else 2)
        # Keras has called set_model before, so process_set is known.
        super().set_params({**params, "verbose": verbose if self.process_set.rank() == 0 else 0})
        self._steps = params["steps"]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._samples_per_step = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.target = self._steps  # if it is unknown, Keras would keep that of the first epoch
        self._samples = self._first = None
        self._reset_progbar()
        self._maybe_init_progbar()
        if self.verbose == 1:
            _print(f"{self._name(epoch)}\n")
        self._start = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._first is None:
            self._first = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._steps is not None:
            batch = min(batch, self._steps - 1)  # steps_per_execution may overshoot
        if self._samples_per_step is not None:
            seconds = time.monotonic() - self._start
            self._show(self._samples_per_step * (batch + 1) / seconds)
        super().on_train_batch_end(batch, logs)
        if batch + 1 == self._steps:
            self._end_of_training()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count the training samples before validation resets them."""
        if self._called_in_fit:
            self._end_of_training()
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_of_training()
        # NaN if a rank cannot count its own.
        total = sum(agree.gather_json("progress samples", self._samples, self.process_set))
        self._samples_per_step = None if np.isnan(total) else total / max(1, self.seen)
        rate = (self.seen - (self._first or 0)) / self._seconds
        if self._samples_per_step is None:
            self._show(rate, "steps")
        else:
            self._show(rate * self._samples_per_step)
        # If training stopped in the middle of the epoch, the bar stays there.
        self.progbar.target = self._steps or self.seen
        self.target = self.seen
        if self.verbose == 2:
            _print(f"{self._name(epoch)}: ")
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Lets a later ``evaluate`` show its own bar again."""
        self._called_in_fit = False

    def _name(self, epoch: int) -> str:
        return f"Epoch {epoch + 1}" + (f"/{self.epochs}" if self.epochs else "")

    def _end_of_training(self) -> None:
        if self._samples is None:
            self._seconds = time.monotonic() - self._start
            self._samples = progress.samples_of(self.model, self.seen)

    def _show(self, rate: float, unit: str = "samples") -> None:
        # The bar prints the unit behind the time of a step.
        self.progbar.unit_name = f"step - {rate:.{0 if rate >= 10 else 2}f} {unit}/s"


def _print(text: str) -> None:
    """Print as the bar does, unless Keras is configured to write to its log."""
    if keras.config.is_interactive_logging_enabled():
        print(text, end="", flush=True)
