"""Adapts Keras's own callbacks to several processes that train one model.

Callbacks that write files do so on the first rank of the process set only. Callbacks that decide
something decide alike on all ranks: if one rank stopped alone, the others would wait for its
gradients. The classes are patched, so that users pass them to ``fit`` as usual.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvd_keras import agree, ops, rank_info
from hvd_keras._keras import keras
from hvd_keras.process_sets import ProcessSet
from hvd_keras.training import fitting, together

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_DECIDERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


def patches() -> Iterator[tuple[Any, str, str, Callable[[Any], Any]]]:
    """Yields class, attribute, reason and wrapper of each method that changes."""
    for writer in _WRITERS:
        for name in [n for n in vars(writer) if n.startswith("on_") or n == "set_model"]:
            yield writer, name, "to write files on one rank alone", _on_leader_alone(name)
    for decider in _DECIDERS:
        yield decider, "on_epoch_end", "to decide alike on all ranks", _by_a_common_value
    backup = keras.callbacks.BackupAndRestore
    yield backup, "on_train_begin", "to refuse a restart of one rank alone", _refuse_backups
    if swap := getattr(keras.callbacks, "SwapEMAWeights", None):  # which tf_keras does not have
        for name in ("_swap_variables", "_finalize_ema_values"):
            yield swap, name, "to refuse averages of which a rank has a share", _refuse_shares
    terminate = keras.callbacks.TerminateOnNaN
    yield terminate, "on_batch_end", "to end training on all ranks", _terminate_together


def _others(model: Any) -> ProcessSet | None:
    """The process set that trains this model; None if this rank trains it alone."""
    if model is None or not rank_info.is_initialized():
        return None
    process_set = together.process_set_of(model)
    return process_set if process_set is not None and process_set.size() > 1 else None


def _on_leader_alone(name: str) -> Callable[[Any], Any]:
    def wrap(hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def on_leader(self: Any, *args: Any, **kwargs: Any) -> None:
            model = self.model
            if name == "set_model":
                model = args[0] if args else kwargs["model"]
            process_set = _others(model)
            if process_set is None or process_set.rank() == 0:
                hook(self, *args, **kwargs)
            elif name == "set_model":  # a derived class may use self.model
                keras.callbacks.Callback.set_model(self, model)
            if name == "on_epoch_end" and isinstance(self, keras.callbacks.ModelCheckpoint):
                fitting.wait_for_checkpoint(self)

        return on_leader

    return wrap


def _by_a_common_value(hook: Callable[..., None]) -> Callable[..., None]:
    """Decides by the mean of the ranks' values, if they differ.

    After ``MetricAverageCallback`` they are equal.
    """

    @functools.wraps(hook)
    def on_epoch_end(self: Any, epoch: int, logs: dict[str, Any] | None = None) -> None:
        process_set = _others(self.model)
        if process_set is None:
            hook(self, epoch, logs)
            return
        logs = {} if logs is None else logs
        mine = logs.get(self.monitor)
        name = f"{type(self).__name__}.{self.monitor}"
        everyone = agree.gather_json(name, None if mine is None else float(mine), process_set)
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


def _refuse_backups(restore: Callable[..., None]) -> Callable[..., None]:
    """Raises, because ``BackupAndRestore`` would restore files that only one rank has written."""

    def on_train_begin(self: Any, logs: dict[str, Any] | None = None) -> None:
        process_set = _others(self.model)
        if process_set is not None:
            raise ValueError(
                "keras.callbacks.BackupAndRestore restores each process by itself, but this model "
                f"trains on {process_set.size()}: a rank that finds another state, or none, would "
                f"differ from the rest. Use hvd.callbacks.Checkpoint({str(self.backup_dir)!r}), "
                "which writes on one rank and restores all."
            )
        restore(self, logs)

    return on_train_begin


def _refuse_shares(swap: Callable[..., None]) -> Callable[..., None]:
    """Raises if this rank has the moving averages of its own variables only."""

    def swap_all(self: Any) -> None:
        if hasattr(together.innermost(self.model.optimizer), "_hvd_state"):
            raise ValueError(
                "keras.callbacks.SwapEMAWeights needs all moving averages, but each rank has a "
                "share of them: leave shard_state=True out of hvd.DistributedOptimizer, or the "
                "callback."
            )
        swap(self)

    return swap_all


def _terminate_together(check: Callable[..., None]) -> Callable[..., None]:
    """Ends training on all ranks after the same batch if one rank has a NaN."""

    def on_batch_end(self: Any, batch: int, logs: dict[str, Any] | None = None) -> None:
        process_set = _others(self.model)
        if process_set is not None:
            mine = float((logs or {}).get("loss") or 0.0)
            # The mean is finite only if all values are.
            (mean,) = ops.reduce_tensors(
                [np.float64(mine)],
                op=ops.Average,
                name="TerminateOnNaN.loss",
                process_set=process_set,
            )
            logs = {**(logs or {}), "loss": float(mean)}
        check(self, batch, logs)

    return on_batch_end
