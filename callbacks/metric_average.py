"""Same metrics on all ranks."""

import warnings
from typing import Any

from hvd_keras.callbacks.base import Callback

from hvd_keras._keras import is_legacy
from hvd_keras.training import metrics

# The model's method that gives what fit and evaluate log.
_RESULT = "_validate_and_get_metrics_result" if is_legacy else "_get_metrics_result_or_logs"


class MetricAverageCallback(Callback):  # type: ignore[misc]
    """Replaces a rank's metrics by those of all ranks' samples.

    The loss and the metrics of training and validation are computed from the sum of the ranks'
    metric states (totals, counts, confusion matrices). So they are what one process would log that
    had seen all ranks' batches: also AUC, Precision, F1Score, RootMeanSquaredError and the like,
    and when ranks have different numbers of samples. The metrics themselves keep this rank's state.

    Metrics of your own are covered if they derive from one of Keras's (``keras.metrics.Mean``) and
    add no variables. Of others the mean of the ranks' values is logged, in which each rank counts
    the same; rank 0 warns once. So it is for numbers that other callbacks have put into the logs.

    Put it before callbacks that read metrics (``ReduceLROnPlateau``, ``EarlyStopping``, loggers):
    they then see the same values, and decide the same, on all ranks. Put it also before callbacks
    that change a metric in the logs or call ``model.evaluate`` at the end of an epoch.

    Shard the validation data by rank, like the training data. ``model.evaluate`` returns all ranks'
    metrics if it gets this callback, too; all ranks must call it then. Without the callback it
    returns this rank's.

    Raises:
        ValueError: (in ``fit`` and ``evaluate``) the ranks log different metrics, such as
            ``val_loss`` on one rank only; on every rank.

    Example:
        average = hvd.callbacks.MetricAverageCallback()
        stop = keras.callbacks.EarlyStopping("val_auc", mode="max", patience=3)
        model.fit(x, y, validation_data=(x_val, y_val), callbacks=[average, stop])
        results = model.evaluate(x_test, y_test, callbacks=[average], return_dict=True)
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False
        self._states: dict[str, list[metrics.MetricState]] = {}
        self._warned: set[str] = set()

    def set_model(self, model: Any) -> None:
        """At the start of every ``fit`` and every ``evaluate`` that is not part of one."""
        super().set_model(model)
        self._in_epoch = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """From Keras."""
        self._in_epoch = True
        self._states = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keeps the training's metrics, which validation is about to reset."""
        if self.process_set.size() == 1:
            return
        if self._in_epoch:
            self._states[""] = metrics.states(self.model)
        else:
            self._reduce_what_evaluate_returns()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Keeps the validation's metrics.

        They are not exchanged yet: if only some ranks validate, the others would not answer.
        """
        if self._in_epoch and self.process_set.size() > 1:
            self._states["val_"] = metrics.states(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Changes ``logs`` in place."""
        self._in_epoch = False
        if self.process_set.size() == 1:
            return
        if "" not in self._states and self.model is not None:
            self._states[""] = metrics.states(self.model)
        self._reduce({} if logs is None else logs)

    def _reduce(self, logs: dict[str, Any]) -> None:
        reasons = metrics.reduce_logs(logs, self._states, self.process_set)
        self._states = {}
        new = {key: reason for key, reason in reasons.items() if key not in self._warned}
        self._warned.update(new)
        if self.process_set.rank() == 0:
            for reason in dict.fromkeys(new.values()):
                keys = ", ".join(key for key in new if new[key] == reason)
                warnings.warn(
                    f"MetricAverageCallback: what is logged of {keys} is the mean of the ranks' "
                    f"values, in which each rank counts the same, because {reason}.",
                    stacklevel=2,
                )

    def _reduce_what_evaluate_returns(self) -> None:
        """For the next end of ``evaluate`` only.

        Keras returns what its model's method gives, whatever callbacks do to the logs, so that the
        method is replaced until it has been called. Should the evaluation break off, then the next
        one or the next epoch, which begin with ``reset_metrics``, put it back: they may well be
        this rank's alone.
        """
        model = self.model
        names = (_RESULT, "reset_metrics")
        before = {name: model.__dict__[name] for name in names if name in model.__dict__}
        result, reset = getattr(model, _RESULT), model.reset_metrics
        has_begun = False

        def put_back() -> None:
            for name in names:
                model.__dict__.pop(name, None)
            model.__dict__.update(before)

        def reset_metrics() -> None:
            nonlocal has_begun
            if has_begun:
                put_back()
            has_begun = True
            reset()

        def result_of_all_ranks(logs: Any) -> dict[str, Any]:
            put_back()
            reduced = metrics.numbers(result(logs))
            self._states = {"": metrics.states(model)}
            self._reduce(reduced)
            return reduced

        model.reset_metrics = reset_metrics
        setattr(model, _RESULT, result_of_all_ranks)
