"""What ``init`` changes in Keras on PyTorch: ``fit``, ``evaluate``, losses, saving."""

import contextvars
import functools
import inspect
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.backends.torch import losses, variables
from hvd_keras.gradients.model_ranks import of_optimizer, process_set_of, reducers_of
from hvd_keras.hooks import fits
from hvd_keras.hooks.fits import Fit, current, running, saving_on_leader
from hvd_keras.rows import checks
from hvd_keras.runtime import agree, log, rank_info, settings
from hvd_keras.runtime.keras import require
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.saving import storage

#: Keras looks at a batch to create the variables of a model.
is_building = contextvars.ContextVar("Keras builds a model", default=False)

_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("CSVLogger", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)
)
_CHECKPOINT = keras.callbacks.ModelCheckpoint
_DECIDERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


@functools.cache
def install() -> None:
    """Wrap what is needed. Raises RuntimeError if this Keras lacks any of it."""
    model = keras.Model
    for owner, attribute, wrap in (
        (model, "fit", _wrap_fit),
        (model, "train_on_batch", _wrap_train_on_batch),
        (model, "evaluate", _wrap_evaluate),
        (model, "_symbolic_build", _wrap_build),
        (model, "save", storage.wrap_save),
        (model, "save_weights", storage.wrap_save),
        (keras.optimizers.Optimizer, "apply", _wrap_apply),
        (keras.losses.Loss, "__call__", losses.wrap_call),
        (keras.optimizers.LossScaleOptimizer, "check_finite", _wrap_check_finite),
    ):
        require(owner, attribute, "to train on several ranks")
        setattr(owner, attribute, wrap(getattr(owner, attribute)))


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
        if several and of_optimizer(self) is None:
            _complain(
                f"optimizer {type(self).__name__} applies gradients of this rank alone, so "
                f"each of the {rank_info.size()} ranks trains a different model. Use "
                f"hvd.DistributedOptimizer({type(self).__name__}(...)).",
                global_process_set,
            )
        return apply(self, *args, **kwargs)

    return apply_and_tell


def _wrap_check_finite(check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(check)
    def check_on_all_ranks(self: Any, grads: Any) -> Any:
        """All ranks skip a step, or none: only then do they exchange gradients."""
        finite, reducer = check(self, grads), of_optimizer(self)
        if reducer is None or reducer.process_set.size() == 1:
            return finite
        call: dict[str, Any] = {"process_set": reducer.process_set.id(), "reduction": "Min"}
        mine = np.array([bool(finite)])
        (everywhere,) = agree.run("allreduce", [mine], name="gradients are finite", **call)
        return torch.tensor(bool(everywhere[0]))

    return check_on_all_ranks


def _wrap_build(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_and_compare(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        own = running(self)
        if own is not None and iterator is not None and not own.has_begun:
            _begin(own, iterator)
        with agree.within(is_building, True):
            return build(self, iterator=iterator, data_batch=data_batch)

    return build_and_compare


def _begin(own: Fit, iterator: Any) -> None:
    """Compare what all ranks must have alike, before callbacks begin."""
    own.has_begun = True
    loader: Any = own.arguments.get("x")
    if hasattr(loader, "passes"):  # of hvd.data.shard
        own.passes = [loader.passes]
        own.seekable = loader if own.arguments.get("steps_per_epoch") is None else None
    if own.process_set.size() == 1:
        return
    saving = [c.save_freq for c in own.callbacks if isinstance(c, _CHECKPOINT)]
    mine = [iterator.num_batches, saving]
    gathered = agree.gather_json("fit", mine, own.process_set)
    own.waits_for_checkpoints = all(saving == theirs for _, theirs in gathered)
    steps = [steps for steps, _ in gathered]
    if len(set(steps)) > 1:
        raise ValueError(
            "fit: the ranks have different numbers of batches per epoch, so some would wait for "
            f"ever ({agree.by_rank(list(map(str, steps)), own.process_set)}). Use hvd.data.shard, "
            "or steps_per_epoch=hvd.data.agree_on_steps(…)."
        )
    checks.check_passes(list(own.passes), own.process_set)


def _wrap_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        process_set = process_set_of(self) if rank_info.is_initialized() else None
        if process_set is None:
            return fit(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        if hasattr(arguments.get("x"), "passes"):
            arguments.setdefault("shuffle", False)  # Keras warns that it does not shuffle
        given = keras.tree.flatten(arguments.get("callbacks") or [])
        own = Fit(self, given, arguments, process_set, looks_at_data=True)
        if process_set.size() == 1:
            with fits.during(own):
                return fit(**arguments)
        _refuse(self, arguments.get("callbacks"))
        if process_set.rank():
            given = [c for c in given if not isinstance(c, _WRITERS)]
            if arguments.get("verbose", "auto") == "auto" and not settings.read().verbose_all:
                arguments["verbose"] = 0
        arguments["callbacks"] = [*given, _Together(own)]
        with fits.during(own), _weighing(self, process_set), saving_on_leader(own):
            history = fit(**arguments)
        # So files that one rank has written are there for all.
        agree.gather_json("fit has ended", None, process_set)
        return history

    return fit_together


def _weighing(model: Any, process_set: ProcessSet) -> AbstractContextManager[None]:
    reducers: list[Any] = reducers_of(model)
    averages = all(reducer.averages for reducer in reducers)
    return agree.within(losses.weighing, losses.Weighing(process_set, averages))


def _wrap_train_on_batch(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def train_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        process_set = process_set_of(self) if rank_info.is_initialized() else None
        if process_set is None or process_set.size() == 1:
            return train(self, *args, **kwargs)
        _refuse(self, None)
        with _weighing(self, process_set):
            return train(self, *args, **kwargs)

    return train_together


def _refuse(model: Any, given: Any) -> None:
    """Raise an error about what cannot work on several ranks."""
    if hasattr(given, "callbacks"):
        raise NotImplementedError("fit: got a CallbackList, expected a list of callbacks.")
    if model.jit_compile:
        reducers: list[Any] = reducers_of(model)
        for reducer in reducers:
            reducer.leave_uncompiled()
    averages = False
    for callback in keras.tree.flatten(given or []):
        averages |= hasattr(callback, "_hvd_averages")
        name, kind = type(callback).__name__, type(callback)
        if isinstance(callback, (keras.callbacks.BackupAndRestore, keras.callbacks.TerminateOnNaN)):
            raise NotImplementedError(
                f"fit: {name} decides for each rank by itself, so it is not supported on several "
                "ranks on PyTorch. Leave it out; hvd.callbacks.Checkpoint restores all ranks."
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


class _Together(keras.callbacks.Callback):  # type: ignore[misc]
    """The last callback: compares weights and rows, and stops all ranks if one stops."""

    def __init__(self, common: Fit) -> None:
        super().__init__()
        self._common, self._process_set = common, common.process_set
        self._begun = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._begun:
            return
        self._begun = True
        self._check(
            "begin with different weights, so they train different models. Give fit "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0) as its first callback"
        )
        if not self._common.looks_at_data:
            return
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
        with agree.within(losses.weighing, validates), agree.within(current, None):
            return evaluate(self, *args, **kwargs)

    return evaluate_apart
