"""Learning rates for several ranks."""

import math

from hvd_keras.runtime import rank_info


def linear_scaling(rate: float) -> float:
    """Return ``rate`` times ``size()``: for SGD with momentum.

    Use it with a warm-up over the first epochs, ``hvd.callbacks.LearningRateWarmupCallback`` (Goyal
    et al., 2017, https://arxiv.org/abs/1706.02677).

    Args:
        rate: the learning rate for one rank's batch.

    Raises:
        ValueError: ``init()`` was not called.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(hvd.linear_scaling(0.01)))
    """
    return rate * rank_info.size()


def sqrt_scaling(rate: float) -> float:
    """Return ``rate`` times the square root of ``size()``: for Adam and LAMB.

    This keeps the noise of an adaptive step constant (Krizhevsky, 2014,
    https://arxiv.org/abs/1404.5997, for the rule; You et al., 2019,
    https://arxiv.org/abs/1904.00962, for LAMB; Malladi et al., 2022,
    https://arxiv.org/abs/2205.10287, for Adam).

    Args:
        rate: the learning rate for one rank's batch.

    Raises:
        ValueError: ``init()`` was not called.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Lamb(hvd.sqrt_scaling(0.001)))
    """
    return rate * math.sqrt(rank_info.size())
