"""Learning-rate recipes for large batches (Goyal et al., 2017, https://arxiv.org/abs/1706.02677)."""

from collections.abc import Callable
from typing import Any

import keras

from hvd_keras import runtime


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` within a range of epochs.

    Writes the learning rate to ``logs["lr"]`` at the end of each epoch.

    Args:
        initial_lr: the learning rate that the multiplier multiplies.
        multiplier: a number, or a function of the epoch (counted from 0; with fractions if
            ``staircase`` is False).
        start_epoch: the first epoch in which it acts.
        end_epoch: the first epoch in which it acts no more. Default: never.
        staircase: change the rate at the start of each epoch only, not at each batch.
        momentum_correction: when the rate changes, scale the optimizer's momentum buffers with it,
            as section 3 of the paper advises. Of effect for optimizers whose buffers contain the
            learning rate: SGD and RMSprop with ``momentum``.
        steps_per_epoch: batches per epoch, for ``staircase=False``. Default: what ``fit`` knows.

    Raises:
        ValueError: (in ``fit``) the number of steps is needed and not known, or the optimizer's
            learning rate is a schedule, which cannot be set.

    Example:
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.1 ** (epoch // 30))
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def _steps(self) -> int:
        steps: int | None = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise ValueError(
                f"{type(self).__name__}: the data does not tell how many batches an epoch has. "
                "Give steps_per_epoch."
            )
        return steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers the epoch, for batches know theirs only within it."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adjusts the rate where it is due."""
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self._epoch + batch / self._steps())
        elif batch == 0:
            self._set(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate."""
        if logs is not None:
            logs["lr"] = self._get()

    def _get(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = self._get(), self.initial_lr * self.multiplier(epoch)
        try:
            optimizer.learning_rate = new
        except TypeError as error:
            raise ValueError(
                f"{type(self).__name__}: the optimizer's learning rate is a schedule, which cannot "
                "be set. Give the optimizer a number, or leave this callback out."
            ) from error
        if self.momentum_correction and old > 0 and new != old:
            for buffer in _momentum_buffers(optimizer):
                buffer.assign(buffer * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` in the first epochs.

    Linearly, batch by batch, as Goyal et al. do, to get through the first epochs in which a rate
    scaled by ``size()`` would make training diverge.

    Args:
        initial_lr: the learning rate after warm-up, already scaled by ``hvd.size()``.
        warmup_epochs: how many epochs it takes.
        momentum_correction, steps_per_epoch: as in ``LearningRateScheduleCallback``.
        verbose: above 0, rank 0 says when warm-up ends.

    Example:
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=3)
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # Counted to the end of the batch, so that the last one trains at the full rate.
            done = min(1.0, (epoch + 1 / self._steps()) / warmup_epochs)
            return (1 + done * (runtime.size() - 1)) / runtime.size()

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate, and tells of the end of warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and runtime.rank() == 0:
            print(f"Epoch {epoch + 1}: learning rate is {self._get():g}, warm-up is over.")


def _momentum_buffers(optimizer: Any) -> list[Any]:
    if not getattr(optimizer, "momentum", 0):
        return []
    buffers = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [buffer for buffer in buffers if buffer is not None]
