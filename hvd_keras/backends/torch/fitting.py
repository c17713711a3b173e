"""What ``init`` changes in Keras on PyTorch: ``fit``, ``evaluate``, losses, saving."""

import contextvars
import functools
import importlib
import inspect
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.backends.torch import losses, variables
from hvd_keras.backends.torch.optimizer import _SCALED, process_set_of, reducers_of
from hvd_keras.runtime import agree, log, rank_info, settings
from hvd_keras.runtime.keras import require
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.saving import storage

#: Keras looks at a batch to create the variables of a model.
is_building = contextvars.ContextVar("Keras builds a model", default=False)

_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)
)
_DECIDERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


@functools.cache
def install() -> None:
    """Wrap what is needed. Raises RuntimeError if this Keras lacks any of it."""
    model, seeds = keras.Model, "to give each rank its own randomness"
    require(importlib.import_module(_SEEDS), "global_seed_generator", seeds)
    for owner, attribute, wrap in (
        (model, "fit", _wrap_fit),
        (model, "train_on_batch", _wrap_train_on_batch),
        (model, "evaluate", _wrap_evaluate),
        (model, "_symbolic_build", _wrap_build),
        (model, "save", storage.wrap_save),
        (model, "save_weights", storage.wrap_save),
        (keras.optimizers.Optimizer, "apply", _wrap_apply),
        (keras.losses.Loss, "__call__", losses.wrap_call),
    ):
        require(owner, attribute, "to train on several ranks")
        setattr(owner, attribute, wrap(getattr(owner, attribute)))


_SEEDS = "keras.src.random.seed_generator"


def global_seed_state() -> Any:
    """The state of the generator for ``keras.random`` without a seed, which is in no layer."""
    return importlib.import_module(_SEEDS).global_seed_generator().state


def _complain(text: str, process_set: ProcessSet) -> None:
    """Warn, or with ``HVD_STRICT`` raise a RuntimeError, about what ranks train apart."""
    if settings.read().strict:
        raise RuntimeError(f"hvd_keras: {text}")
    if process_set.rank() == 0:
        log.warn_once(text)


def _wrap_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def apply_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        several = rank_info.is_initialized() and rank_info.size() > 1
        if several and not hasattr(self, "_hvd_reducer"):
            _complain(
                f"optimizer {type(self).__name__} applies gradients of this rank alone, so "
                f"each of the {rank_info.size()} ranks trains a different model. Use "
                f"hvd.DistributedOptimizer({type(self).__name__}(...)).",
                global_process_set,
            )
        return apply(self, *args, **kwargs)

    return apply_and_tell


def _wrap_build(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_and_compare(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        process_set = _fits.get()
        if process_set is not None and iterator is not None:
            steps = agree.gather_json("numbers of steps", iterator.num_batches, process_set)
            if len(set(steps)) > 1:
                raise ValueError(
                    "fit: the ranks have different numbers of batches per epoch, so some would "
                    f"wait for ever ({agree.by_rank(list(map(str, steps)), process_set)}). Use "
                    "hvd.data.shard, or steps_per_epoch."
                )
        with agree.within(is_building, True):
            return build(self, iterator=iterator, data_batch=data_batch)

    return build_and_compare


# The ranks of the fit that is about to build its model.
_fits: contextvars.ContextVar[ProcessSet | None] = contextvars.ContextVar("fit", default=None)


def _wrap_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        process_set = process_set_of(self) if rank_info.is_initialized() else None
        if process_set is None or process_set.size() == 1:
            return fit(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        given = _refused(self, arguments.get("callbacks"))
        if process_set.rank():
            given = [c for c in given if not isinstance(c, _WRITERS)]
            if arguments.get("verbose", "auto") == "auto" and not settings.read().verbose_all:
                arguments["verbose"] = 0
        arguments["callbacks"] = [*given, _Together(process_set)]
        with agree.within(_fits, process_set), _weighing(self, process_set):
            history = fit(**arguments)
        # So files that one rank has written are there for all.
        agree.gather_json("fit has ended", None, process_set)
        return history

    return fit_together


def _weighing(model: Any, process_set: ProcessSet) -> AbstractContextManager[None]:
    averages = all(reducer.averages for reducer in reducers_of(model))
    return agree.within(losses.weighing, losses.Weighing(process_set, averages))


def _wrap_train_on_batch(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def train_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        process_set = process_set_of(self) if rank_info.is_initialized() else None
        if process_set is None or process_set.size() == 1:
            return train(self, *args, **kwargs)
        _refused(self, None)
        with _weighing(self, process_set):
            return train(self, *args, **kwargs)

    return train_together


def _refused(model: Any, given: Any) -> list[Any]:
    """Return a fit's callbacks as a list, after a look at what cannot work on several ranks."""
    if hasattr(given, "callbacks"):
        raise NotImplementedError("fit: got a CallbackList, expected a list of callbacks.")
    found: list[Any] = keras.tree.flatten(given or [])
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(_SCALED)
    if model.jit_compile:
        raise NotImplementedError(
            "fit: torch.compile (jit_compile=True) is not supported on several ranks. Compile the "
            "model without it."
        )
    averages = False
    for callback in found:
        averages |= hasattr(callback, "_hvd_averages")
        name, kind = type(callback).__name__, type(callback)
        if isinstance(callback, (keras.callbacks.BackupAndRestore, keras.callbacks.TerminateOnNaN)):
            raise NotImplementedError(
                f"fit: {name} decides for each rank by itself, so it is not supported on several "
                "ranks on PyTorch. Leave it out."
            )
        if isinstance(callback, _DECIDERS) and not averages:
            raise ValueError(
                f"fit: {name} decides by metrics, which differ by rank. Put "
                "hvd.callbacks.MetricAverageCallback() before it."
            )
        if isinstance(callback, _WRITERS) and not kind.__module__.startswith("keras."):
            raise NotImplementedError(
                f"fit: {name} derives from a callback that writes files. On PyTorch, give it to "
                "one rank alone, without methods that change the training."
            )
    return found


class _Together(keras.callbacks.Callback):  # type: ignore[misc]
    """The last callback: compares weights and rows, and stops all ranks if one stops."""

    def __init__(self, process_set: ProcessSet) -> None:
        super().__init__()
        self._process_set = process_set
        self._begun = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._begun:
            return
        self._begun = True
        self._check(
            "begin with different weights, so they train different models. Give fit "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0) as its first callback"
        )
        train = self.model.train_function

        def with_a_look(data: Any) -> Any:
            self.model.train_function = train  # for all later steps
            _check_rows(data[0], self._process_set)
            return train(data)

        self.model.train_function = with_a_look

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._check(
            "have different weights after an epoch: something changes them on one rank alone, or "
            "is not the same on all"
        )
        # As many callbacks do: if logs["accuracy"] > 0.99: self.model.stop_training = True.
        mine = bool(self.model.stop_training)
        if any(agree.gather_json("an epoch of fit has ended", mine, self._process_set)):
            self.model.stop_training = True

    def _check(self, what: str) -> None:
        digest = variables.digest(self.model)
        if len(set(agree.gather_json("weights", digest, self._process_set))) > 1:
            _complain(f"the ranks {what}.", self._process_set)


def _check_rows(batch: Any, process_set: ProcessSet) -> None:
    """Complain if all ranks have the same first rows."""
    crc, rows, differ = 0, 0, False
    for part in keras.tree.flatten(batch):
        if part is not None:
            head = np.ascontiguousarray(np.asarray(torch.as_tensor(part)[:64]))
            crc, rows = zlib.crc32(head.tobytes(), crc), len(part)
            differ |= bool((head != head[:1]).any())
    views = agree.gather_json("first rows", [rows, crc, differ], process_set)
    if differ and all(view == views[0] for view in views):
        _complain(
            "all ranks train on the same rows, so several do no more than one. Give each rank its "
            "own: hvd.data.shard((x, y), batch_size=32).",
            process_set,
        )


def _wrap_evaluate(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def evaluate_apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Ranks may evaluate alone, or make different numbers of steps.
        own = losses.weighing.get()
        validates = own and losses.Weighing(own.process_set, own.averages, validates=True)
        with agree.within(losses.weighing, validates), agree.within(_fits, None):
            return evaluate(self, *args, **kwargs)

    return evaluate_apart
