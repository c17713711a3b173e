"""Learning-rate recipes for large batches (Goyal et al., 2017, https://arxiv.org/abs/1706.02677)."""

from collections.abc import Callable
from typing import Any

from hvd_keras.callbacks.base import Callback

from hvd_keras.gradients.model_ranks import reducer_within, reducers_of
from hvd_keras.runtime.keras import innermost, is_legacy, keras, require, scaling


class _LearningRate(Callback):  # type: ignore[misc]
    """Shared by both callbacks: the position in training, and how the rate is set and logged."""

    _scale: Any = None  # multiplies the momentum buffers with these ids
    _scaled: tuple[int, ...] = ()

    def __init__(
        self, initial_lr: float, momentum_correction: bool, steps_per_epoch: int | None
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError(
                f"{type(self).__name__}: initial_lr is None, expected a learning rate, such as "
                "0.01 * hvd.size()."
            )
        self.initial_lr = initial_lr
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
        if reducers_of(self.model) and reducer_within(self.model.optimizer) is None:
            raise ValueError(
                f"{type(self).__name__}: the distributed optimizers are in attributes of the "
                "model, and this callback sets the rate of the one in compile, which is not "
                "distributed. Set theirs in a callback of your own, and remove this one."
            )
        return float(self.model.optimizer.learning_rate)

    def _set(self, new: float) -> None:
        optimizer = self.model.optimizer
        try:
            old = self._get()  # raises, too, if there is none
            optimizer.learning_rate = new
        except (AttributeError, TypeError) as error:
            what = "schedule" if isinstance(error, TypeError) else "function"
            why = f"the rate is a {what}, which cannot be set. Give the optimizer a number"
            if not hasattr(optimizer, "learning_rate"):
                why = f"a {type(optimizer).__name__} has no rate. Set those of its optimizers"
            raise ValueError(f"{type(self).__name__}: {why}, or remove this callback.") from error
        # Buffers hold earlier gradients times their rate (section 3 of the paper).
        if self.momentum_correction and old > 0 and new != old:
            buffers = _momentum_buffers(innermost(optimizer))
            numbers = tuple(map(id, buffers))
            if self._scaled != numbers:
                self._scaled, self._scale = numbers, scaling(buffers)
            if buffers:
                self._scale(new / old)


class LearningRateScheduleCallback(_LearningRate):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` within a range of epochs.

    Writes the learning rate to ``logs["lr"]`` at the end of each epoch.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, or a function of the epoch, which counts from 0 and has a fractional
            part if ``staircase`` is False.
        start_epoch: the first epoch of the range.
        end_epoch: the first epoch after the range. Default: no end.
        staircase: change the rate only at the start of an epoch; False: at each batch.
        momentum_correction: scale the optimizer's momentum buffers when the rate changes, as
            section 3 of the paper advises. This affects optimizers whose buffers contain the
            learning rate: SGD and RMSprop with ``momentum``.
        steps_per_epoch: batches per epoch, for ``staircase=False``. Default: as ``fit`` knows.

    Raises:
        ValueError: ``initial_lr`` is None; (in ``fit``) the number of steps is needed and unknown,
            or the optimizer's rate is a schedule or a function, or does not exist
            (``MultiOptimizer``).

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
        super().__init__(initial_lr, momentum_correction, steps_per_epoch)
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


class LearningRateWarmupCallback(_LearningRate):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` as training begins.

    The rate grows linearly, batch by batch (Goyal et al.). In the first epochs a rate scaled by
    ``size()`` would make training diverge.

    The rate is a function of the epoch and the batch, so a restart with ``initial_epoch`` continues
    the warm-up. With ``warmup_steps`` and data of unknown length it is a function of the
    optimizer's step count instead, which a restored optimizer keeps. Keras adds one to that count
    per epoch, when it looks for a batch after the last one.

    Writes the learning rate to ``logs["lr"]`` at the end of each epoch.

    Args:
        initial_lr: the learning rate after warm-up, already scaled by ``hvd.size()``.
        warmup_epochs: the length of warm-up in epochs.
        momentum_correction, steps_per_epoch: as in ``LearningRateScheduleCallback``.
        verbose: above 0, rank 0 prints when warm-up ends.
        warmup_steps: the length of warm-up in batches of one rank, instead of ``warmup_epochs``.
            Batches whose gradients are only accumulated count, too.

    Raises:
        ValueError: ``warmup_steps`` is not a positive integer; (in ``fit``) as
            ``LearningRateScheduleCallback``.

    Example:
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=3)
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_steps=500)
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        warmup_steps: int | None = None,
    ) -> None:
        super().__init__(initial_lr, momentum_correction, steps_per_epoch)
        if warmup_steps is not None and (not isinstance(warmup_steps, int) or warmup_steps < 1):
            raise ValueError(f"warmup_steps is {warmup_steps!r}, expected a positive integer.")
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
        done = min(1.0, (seen + int(self.model.steps_per_execution)) / length)
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
    if is_legacy and isinstance(optimizer, keras.optimizers.legacy.Optimizer):
        require(optimizer, "_slots", "to correct the momentum")
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots]
    built = getattr(optimizer, "_built" if is_legacy else "built", False)
    # Those of others, such as Muon, are sums of gradients without the rate.
    has_rates = isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop))
    if not has_rates or not getattr(optimizer, "momentum", 0) or not built:
        return []
    name = "momentums" if hasattr(optimizer, "momentums") else "_momentums"
    require(optimizer, name, "to correct the momentum")
    return [buffer for buffer in getattr(optimizer, name) if buffer is not None]
