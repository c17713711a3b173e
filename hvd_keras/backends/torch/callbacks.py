"""The callbacks that there are on PyTorch; ``hvd.callbacks`` there."""

from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.backends.torch.variables import broadcast_variables
from hvd_keras.gradients.model_ranks import process_set_of
from hvd_keras.hooks import preprocessing, variables
from hvd_keras.hooks.checkpoints import Checkpoints
from hvd_keras.hooks.fits import running
from hvd_keras.hooks.learning_rates import Schedule, Warmup
from hvd_keras.hooks.metric_averaging import MetricAverage
from hvd_keras.hooks.statistics_averaging import StatisticsAveraging
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "Checkpoint",
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
            _mix_in_rank(process_set)
            fit = running(self.model)
            if fit is None or not fit.restored:
                layers = list(self.model._flatten_layers())
                preprocessing.check_equal_on_all_ranks(layers, process_set, self.root_rank)
                shared = variables.of_training(self.model)
                broadcast_variables(shared, self.root_rank, process_set)
                preprocessing.refresh(self.model)


def _mix_in_rank(process_set: ProcessSet) -> None:
    """Give this rank its own random numbers outside of layers: Keras's and torch's."""
    variables.give_each_rank_its_own_randomness(variables.global_seed_states(), process_set)
    if process_set.rank():
        seed = np.array([torch.initial_seed()], object)
        torch.manual_seed(int(variables.of_this_rank(seed, process_set)[0]))


class Checkpoint(Checkpoints, _Callback):
    """Saves the whole state of the training, and restores the last intact checkpoint.

    The files, the arguments, the errors and the place in the list are those of
    ``hvd.callbacks.Checkpoint`` on TensorFlow, and a file of one backend restores on the other.
    The state of torch's global generator is saved, too.
    """

    _reads_in_step = False


class MetricAverageCallback(MetricAverage, _Callback):
    """Logs the metrics over all ranks' samples, from the sums of the ranks' metric states.

    Put it before callbacks that read metrics. ``model.evaluate`` returns the metrics over all
    ranks if it gets this callback and all ranks call it.
    """


class LearningRateScheduleCallback(Schedule, _Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` within a range of epochs."""


class LearningRateWarmupCallback(Warmup, _Callback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` in first epochs."""
