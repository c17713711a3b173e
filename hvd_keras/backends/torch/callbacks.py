"""The callbacks that there are on PyTorch; ``hvd.callbacks`` there."""

from typing import Any

import keras

from hvd_keras.backends.torch import fitting, variables
from hvd_keras.backends.torch.optimizer import process_set_of
from hvd_keras.hooks.learning_rates import Schedule, Warmup
from hvd_keras.hooks.metric_averaging import MetricAverage
from hvd_keras.hooks.statistics_averaging import StatisticsAveraging
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
]

ModelCheckpoint = keras.callbacks.ModelCheckpoint  # of which fit keeps that of the first rank


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    raise NotImplementedError(
        f"hvd.callbacks.{name} needs Keras on TensorFlow, and KERAS_BACKEND is torch. On PyTorch "
        f"there are {', '.join(__all__)}."
    )


class _Callback(keras.callbacks.Callback):  # type: ignore[misc]
    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train the model."""
        return (self.model and process_set_of(self.model)) or global_process_set


class BroadcastGlobalVariablesCallback(StatisticsAveraging, _Callback):
    """Gives all ranks the root rank's model and optimizer state before the first step.

    Random generators get the root's seed mixed with the rank. At the end of each epoch the moving
    statistics of batch normalisation are averaged over the ranks.

    Args:
        root_rank: the rank whose state all ranks get.

    Raises:
        ValueError: (in ``fit``, on every rank) ``root_rank`` is none of the ranks that train the
            model, or the ranks' models differ.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        process_set = self.process_set
        process_set.check_root(self.root_rank)
        if process_set.size() > 1:
            variables.mix_in_rank(fitting.global_seed_state(), process_set)
            shared = variables.of_training(self.model)
            variables.broadcast_variables(shared, self.root_rank, process_set)

    def _average_moving_statistics(self) -> None:
        statistics = variables.moving_statistics(self.model)
        variables.average_variables(statistics, self.process_set)


class MetricAverageCallback(MetricAverage, _Callback):
    """Logs the metrics over all ranks' samples, from the sums of the ranks' metric states.

    Put it before callbacks that read metrics. ``model.evaluate`` returns the metrics over all
    ranks if it gets this callback and all ranks call it.
    """


class LearningRateScheduleCallback(Schedule, _Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` within a range of epochs."""


class LearningRateWarmupCallback(Warmup, _Callback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` in first epochs."""
