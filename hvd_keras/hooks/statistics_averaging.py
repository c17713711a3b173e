"""The moving statistics of a training are averaged over the ranks, on every backend of Keras."""

from typing import Any

from hvd_keras.gradients import model_ranks
from hvd_keras.hooks import variables
from hvd_keras.runtime.process_sets import ProcessSet


class StatisticsAveraging:
    """Mixed into a callback that has a ``process_set``: averages once per epoch."""

    model: Any
    process_set: ProcessSet
    params: dict[str, Any]
    _epoch_runs = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch_runs = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Average at the last batch, before other callbacks save or evaluate the model."""
        steps = self.params.get("steps")
        if steps is not None and batch + 1 >= steps:  # steps_per_execution may overshoot
            self._average_once()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average, if the data's length is unknown and this rank validates."""
        self._average_once()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, if the data's length is unknown and this rank does not validate."""
        self._average_once()

    def _average_once(self) -> None:
        if self._epoch_runs:
            self._epoch_runs = False
            statistics = variables.moving_statistics(self.model._flatten_layers())
            variables.average_variables(model_ranks.without_local(statistics), self.process_set)
