"""``MetricAverageCallback``: the same metrics on all ranks."""

import warnings
from contextlib import AbstractContextManager
from typing import Any

from hvd_keras.callbacks.base import Callback

from hvd_keras.gradients import missing_calls
from hvd_keras.runtime.keras import is_legacy, replaced
from hvd_keras.training import fit_state, metric_states

# The model's method that gives what fit and evaluate log.
_RESULT = "_validate_and_get_metrics_result" if is_legacy else "_get_metrics_result_or_logs"


class MetricAverageCallback(Callback):  # type: ignore[misc]
    """Logs the metrics over all ranks' samples instead of this rank's.

    The loss and the metrics of training and validation are computed from the sum of the ranks'
    metric states (totals, counts, confusion matrices). So they are what one process would log that
    had seen all ranks' batches. This includes AUC, Precision, F1Score and RootMeanSquaredError, and
    holds if ranks have different numbers of samples. The metric objects keep this rank's state.

    A metric of your own is included if its class derives from one of Keras's
    (``keras.metrics.Mean``) and adds no variables. For other metrics, and for other numbers that
    callbacks or a ``train_step`` log, such as a norm of gradients, the unweighted mean of the
    ranks' values is logged; for metrics, rank 0 warns once.

    Put it before callbacks that read metrics (``ReduceLROnPlateau``, ``EarlyStopping``, loggers),
    so that these see the same values, and decide alike, on all ranks. Put it also before callbacks
    that change a metric in the logs or call ``model.evaluate`` at the end of an epoch.

    Shard the validation data by rank, like the training data. ``model.evaluate`` returns the
    metrics over all ranks if it gets this callback and all ranks call it; otherwise it returns this
    rank's.

    Raises:
        ValueError: (in ``fit`` and ``evaluate``, on every rank) the ranks log different metrics,
            such as ``val_loss`` on one rank only.

    Example:
        average = hvd.callbacks.MetricAverageCallback()
        stop = keras.callbacks.EarlyStopping("val_auc", mode="max", patience=3)
        test = hvd.data.shard((x_test, y_test), batch_size=32, shuffle=False)
        model.fit(data, validation_data=test, callbacks=[average, stop])
        results = model.evaluate(test, callbacks=[average], return_dict=True)
    """

    _hvd_averages = _hvd_communicates = True

    def __init__(self) -> None:
        super().__init__()
        self.in_epoch = False
        self._states: dict[str, list[metric_states.MetricState]] = {}
        self._of_epoch: dict[str, Any] = {}  # the logs, once this epoch has ended
        self._warned: set[str] = set()

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if fit_state.running(model) is None:  # an evaluate in its fit must not end the epoch
            self.in_epoch = False
            self._of_epoch = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.in_epoch = True
        self._states, self._of_epoch = {}, {}

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._states = {}  # of an evaluate within the epoch, which goes on

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Save the training metrics before validation resets them."""
        if self.in_epoch and self.process_set.size() > 1:
            self._states[""] = metric_states.states(self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Save the validation metrics, if only some ranks may validate.

        They are not exchanged yet: the other ranks would not take part.
        """
        own = fit_state.running(self.model)
        if self.in_epoch and self.process_set.size() > 1 and not (own and own.validates):
            self._states["val_"] = metric_states.states(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.in_epoch = False
        if self.process_set.size() == 1:
            return
        if "" not in self._states and self.model is not None:
            self._states[""] = metric_states.states(self.model)
        states, self._states = self._states, {}
        logs = {} if logs is None else logs
        self._reduce(logs, states)
        self._of_epoch = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Keras gives this rank's logs of the last epoch again."""
        if logs is not None:
            logs.update({key: self._of_epoch[key] for key in logs.keys() & self._of_epoch.keys()})

    def _reduce(
        self, logs: dict[str, Any], states: dict[str, list[metric_states.MetricState]]
    ) -> None:
        own = fit_state.running(self.model)
        others = [c for c in own.callbacks if isinstance(c, MetricAverageCallback)] if own else []
        # Those that another one in front of this one has averaged already need no reason.
        known = {k for c in others for k in logs.keys() & c._of_epoch if c._of_epoch[k] is logs[k]}
        reasons = metric_states.reduce_logs(logs, states, self.process_set)
        names = {k.removeprefix("val_"): why for k, why in reasons.items() if k not in known}
        new = {name: reason for name, reason in names.items() if name not in self._warned}
        self._warned.update(new)
        for reason in dict.fromkeys(new.values()):
            keys = ", ".join(name for name in new if new[name] == reason)
            text = (
                f"hvd_keras: MetricAverageCallback: for {keys} the unweighted mean of the ranks' "
                f"values is logged, because {reason}."
            )
            if missing_calls.is_error(parts=False):
                raise ValueError(text)
            if self.process_set.rank() == 0:
                warnings.warn(text, stacklevel=2)

    def of_evaluate(self, model: Any) -> AbstractContextManager[None]:
        """Let ``evaluate``, which all ranks call, return the metrics of all ranks.

        Its callbacks get them, too, before or behind this one.
        """
        result, is_apart = getattr(model, _RESULT), fit_state.is_apart.get()

        def of_all_ranks(logs: Any) -> Any:
            if fit_state.is_apart.get() != is_apart:  # another evaluate within this one
                return result(logs)
            reduced = metric_states.numbers(result(logs))
            self._reduce(reduced, {"": metric_states.states(model)})
            return reduced

        return replaced(model, _RESULT, of_all_ranks)
