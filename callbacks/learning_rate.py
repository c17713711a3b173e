"""Learning-rate recipes for large batches (Goyal et al., 2017, https://arxiv.org/abs/1706.02677)."""

from hvd_keras.callbacks.base import Callback

from hvd_keras.hooks.learning_rates import Schedule, Warmup


class LearningRateScheduleCallback(Schedule, Callback):  # type: ignore[misc]
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
        ValueError: (in ``fit``) the number of steps is needed and unknown, or the optimizer's
            learning rate is a schedule or does not exist (``MultiOptimizer``).

    Example:
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.1 ** (epoch // 30))
    """


class LearningRateWarmupCallback(Warmup, Callback):  # type: ignore[misc]
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
