"""What the callbacks of learning rates do, on every backend of Keras."""

from collections.abc import Callable
from typing import Any

from hvd_keras.runtime.keras import innermost, is_legacy, require
from hvd_keras.runtime.process_sets import ProcessSet

_STEPS_AT_ONCE = "_steps_per_execution" if is_legacy else "steps_per_execution"


def scaling(buffers: list[Any]) -> Callable[[float], None]:
    """Return a function that multiplies variables by a number, as during warm-up each batch does.

    A backend with graphs has one of its own.
    """

    def scale(factor: float) -> None:
        for buffer in buffers:
            buffer.assign(buffer * factor)

    return scale


class LearningRate:
    """Shared by both callbacks: the position in training, and how the rate is set and logged."""

    model: Any
    params: dict[str, Any]
    process_set: ProcessSet
    _scale: Any = None  # multiplies the momentum buffers with these ids
    _scaled: tuple[int, ...] = ()

    def __init__(self, momentum_correction: bool, steps_per_epoch: int | None) -> None:
        super().__init__()
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def _steps(self) -> int:
        steps: int | None = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise ValueError(
                f"{type(self).__name__}: the number of batches in an epoch is unknown. Pass "
                "steps_per_epoch."
            )
        return steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._get()

    def _get(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _set(self, new: float) -> None:
        optimizer = self.model.optimizer
        try:
            old = self._get()  # raises, too, if there is none
            optimizer.learning_rate = new
        except (AttributeError, TypeError) as error:
            why = "the rate is a schedule, which cannot be set. Give the optimizer a number"
            if isinstance(error, AttributeError):
                why = f"a {type(optimizer).__name__} has no rate. Set those of its optimizers"
            raise ValueError(f"{type(self).__name__}: {why}, or remove this callback.") from error
        # Buffers hold earlier gradients times their rate (section 3 of the paper).
        if self.momentum_correction and old > 0 and new != old:
            self._scale_buffers(_momentum_buffers(innermost(optimizer)), new / old)

    def _scale_buffers(self, buffers: list[Any], factor: float) -> None:
        numbers = tuple(map(id, buffers))
        if self._scaled != numbers:
            self._scaled, self._scale = numbers, scaling(buffers)
        if buffers:
            self._scale(factor)


class Schedule(LearningRate):
    """See ``LearningRateScheduleCallback``."""

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
        super().__init__(momentum_correction, steps_per_epoch)
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.initial_lr * self.multiplier(self._epoch + batch / self._steps()))
        elif batch == 0:
            self._set(self.initial_lr * self.multiplier(self._epoch))


class Warmup(LearningRate):
    """See ``LearningRateWarmupCallback``."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        warmup_steps: int | None = None,
    ) -> None:
        super().__init__(momentum_correction, steps_per_epoch)
        if warmup_steps is not None and (not isinstance(warmup_steps, int) or warmup_steps < 1):
            raise ValueError(f"warmup_steps is {warmup_steps!r}, expected a positive integer.")
        self.initial_lr = initial_lr
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps
        self.verbose = verbose
        self._ends = False  # whether warm-up ends in this epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        seen = self._seen(batch)
        length = self.warmup_steps or self.warmup_epochs * self._steps()
        if seen >= length:
            return
        # Counts to the end of the steps that Keras executes at once, so that the last batch of
        # warm-up trains at the full rate.
        done = min(1.0, (seen + int(getattr(self.model, _STEPS_AT_ONCE))) / length)
        size = self.process_set.size()
        self._set(self.initial_lr * (1 + done * (size - 1)) / size)
        self._ends = done == 1.0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._ends and self.verbose > 0 and self.process_set.rank() == 0:
            print(f"Epoch {epoch + 1}: learning rate is {self._get():g}, warm-up is over.")
        self._ends = False

    def _seen(self, batch: int) -> int:
        """Return the number of batches before this one, over all epochs."""
        if self.warmup_steps is None or self.steps_per_epoch or self.params.get("steps"):
            return self._epoch * self._steps() + batch
        # Not ``iterations``, which counts updates if gradients are accumulated.
        return int(innermost(self.model.optimizer)._iterations)


def _momentum_buffers(optimizer: Any) -> list[Any]:
    built = getattr(optimizer, "_built" if is_legacy else "built", False)
    if not getattr(optimizer, "momentum", 0) or not built:
        return []
    name = "momentums" if hasattr(optimizer, "momentums") else "_momentums"
    require(optimizer, name, "to correct the momentum")
    return [buffer for buffer in getattr(optimizer, name) if buffer is not None]
