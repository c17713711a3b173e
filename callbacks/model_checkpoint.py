"""``ModelCheckpoint``: one rank writes the files."""

from hvd_keras.callbacks.base import Callback

from hvd_keras.runtime.keras import keras


class ModelCheckpoint(Callback, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint``; in ``fit`` on several ranks, the first one writes.

    In ``fit`` Keras's class does the same, if the model has a distributed optimizer. This one also
    marks a model without one, whose ``train_step`` uses a ``hvd.DistributedGradientTape``.

    The first rank of the model's process set, usually rank 0, writes to a temporary file beside the
    target, syncs it to disk and renames it, as ``model.save`` does after ``hvd.init()``. So a crash
    at any time leaves the last checkpoint intact. If writing fails (a full disk), all ranks raise.

    With ``monitor``, put it after ``MetricAverageCallback``, so that it sees the metrics over all
    ranks.

    Args:
        filepath, args, kwargs: as in ``keras.callbacks.ModelCheckpoint``.

    Raises:
        ValueError, TypeError: as ``keras.callbacks.ModelCheckpoint``.
        OSError: (in ``fit``, on all ranks) the file cannot be written.

    Example:
        hvd.callbacks.ModelCheckpoint("checkpoints/{epoch:02d}.keras")
    """
