"""``MetricAverageCallback``: the same metrics on all ranks."""

from hvd_keras.callbacks.base import Callback

from hvd_keras.hooks.metric_averaging import MetricAverage


class MetricAverageCallback(MetricAverage, Callback):  # type: ignore[misc]
    """Logs the metrics over all ranks' samples instead of this rank's.

    The loss and the metrics of training and validation are computed from the sum of the ranks'
    metric states (totals, counts, confusion matrices). So they are what one process would log that
    had seen all ranks' batches. This includes AUC, Precision, F1Score and RootMeanSquaredError, and
    holds if ranks have different numbers of samples. The metric objects keep this rank's state.

    A metric of your own is included if its class derives from one of Keras's
    (``keras.metrics.Mean``) and adds no variables. For other metrics, and for numbers that other
    callbacks put into the logs, the unweighted mean of the ranks' values is logged; for metrics,
    rank 0 warns once.

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
        model.fit(x, y, validation_data=(x_val, y_val), callbacks=[average, stop])
        results = model.evaluate(x_test, y_test, callbacks=[average], return_dict=True)
    """
