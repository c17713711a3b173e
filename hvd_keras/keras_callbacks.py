"""Keras's own callbacks where several processes train one model.

Those that write files do so on rank 0 alone, and those that decide decide alike on all ranks: one
that stopped alone would leave the others waiting for its gradients. On the classes, as in
``loss_scale``, so that users pass them to ``fit`` as ever.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_keras import agree, ops, rank_info
from hvd_keras._keras import keras

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_DECIDERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


@functools.cache
def cover_all_ranks() -> None:
    """From now on Keras's callbacks behave on several ranks as they do on one.

    With models whose optimizer is distributed; with others they are what they were, so that a rank
    may train a model of its own.
    """
    for writer in _WRITERS:
        for name in [n for n in vars(writer) if n.startswith("on_") or n == "set_model"]:
            setattr(writer, name, _on_rank_0_alone(name, getattr(writer, name)))
    for decider in _DECIDERS:
        decider.on_epoch_end = _by_a_common_value(decider.on_epoch_end)
    _refuse_backups()
    _terminate_together()


def _is_one_of_several(model: Any) -> bool:
    """Whether other ranks train this model, too."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    return (
        hasattr(optimizer, "_hvd_distribution")
        and rank_info.is_initialized()
        and rank_info.size() > 1
    )


def _on_rank_0_alone(name: str, hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(hook)
    def on_rank_0(self: Any, *args: Any, **kwargs: Any) -> None:
        model = self.model
        if name == "set_model":
            model = args[0] if args else kwargs["model"]
        if not _is_one_of_several(model) or rank_info.rank() == 0:
            hook(self, *args, **kwargs)
        elif name == "set_model":  # classes derived from it may ask for their model
            keras.callbacks.Callback.set_model(self, model)

    return on_rank_0


def _by_a_common_value(hook: Callable[..., None]) -> Callable[..., None]:
    """What is monitored is equal on all ranks behind ``MetricAverageCallback``; else the mean."""

    @functools.wraps(hook)
    def on_epoch_end(self: Any, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not _is_one_of_several(self.model):
            hook(self, epoch, logs)
            return
        logs = {} if logs is None else logs
        mine = logs.get(self.monitor)
        name = f"{type(self).__name__}.{self.monitor}"
        everyone = agree.gather_json(name, None if mine is None else float(mine))
        known = [value for value in everyone if value is not None]
        if all(value == mine for value in everyone) or not known:
            hook(self, epoch, logs)
            return
        logs[self.monitor] = sum(known) / len(known)
        hook(self, epoch, logs)
        if mine is None:
            del logs[self.monitor]
        else:
            logs[self.monitor] = mine

    return on_epoch_end


def _refuse_backups() -> None:
    """``BackupAndRestore`` reads in the middle of ``fit`` what only one rank may have written."""
    backup = keras.callbacks.BackupAndRestore
    restore = backup.on_train_begin

    def on_train_begin(self: Any, logs: dict[str, Any] | None = None) -> None:
        if _is_one_of_several(self.model):
            raise ValueError(
                "keras.callbacks.BackupAndRestore restores one process, and this model trains on "
                f"{rank_info.size()}: ranks that found another state, or none, would part from the "
                f"rest. Use hvd.callbacks.Checkpoint({str(self.backup_dir)!r}), which writes on "
                "rank 0 and restores all ranks."
            )
        restore(self, logs)

    backup.on_train_begin = on_train_begin


def _terminate_together() -> None:
    """A NaN of one rank ends the training of all, after the same batch."""
    terminate = keras.callbacks.TerminateOnNaN
    check = terminate.on_batch_end

    def on_batch_end(self: Any, batch: int, logs: dict[str, Any] | None = None) -> None:
        if _is_one_of_several(self.model):
            mine = float((logs or {}).get("loss") or 0.0)
            # It is finite only if all are.
            mean = ops.allreduce(np.float64(mine), op=ops.Average, name="TerminateOnNaN.loss")
            logs = {**(logs or {}), "loss": float(mean)}
        check(self, batch, logs)

    terminate.on_batch_end = on_batch_end
