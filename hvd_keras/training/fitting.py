"""Wraps ``fit`` when several ranks train a model.

Before the callbacks begin, the model's variables are created and the ranks compare what must be
equal. When ``fit`` returns, the files that one rank has written are there for all.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras import agree, data, log, observe, ops, rank_info, settings
from hvd_keras._keras import is_legacy, keras
from hvd_keras.process_sets import ProcessSet
from hvd_keras.training import building, exchange, forgotten, lookups, sync_batch_norm, together


@dataclasses.dataclass
class _Fit:
    """A running ``fit`` on all ranks of a process set."""

    model: Any
    process_set: ProcessSet
    checkpoints: list[Any]  # this rank's keras.callbacks.ModelCheckpoint
    has_begun: bool = False
    dataset: Any = None  # what Keras trains on
    # Whether all ranks have equally many checkpoint callbacks and so can wait for each other there.
    checkpoints_are_common: bool = False
    # Which ranks' models have no variables, and why; and the exception of this rank's model.
    unbuilt: str = ""
    problem: Exception | None = None


_current: contextvars.ContextVar[_Fit | None] = contextvars.ContextVar("fit", default=None)


def wrap_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``keras.Model.fit``."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        process_set = None
        callbacks: list[Any] = []
        if rank_info.is_initialized():
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError:
                return fit(self, *args, **kwargs)  # raises an error that says what is wrong
            data.adapt_fit(bound.arguments)
            args, kwargs = bound.args[1:], bound.kwargs
            given = bound.arguments.get("callbacks")
            callbacks = _flat(given)
            if observe.is_publishing() and not hasattr(given, "callbacks"):  # not a CallbackList
                bound.arguments["callbacks"] = [*callbacks, observe.Progress()]
                args, kwargs = bound.args[1:], bound.kwargs
            process_set = _process_set(self, callbacks)
            if process_set is not None and process_set.size() > 1:
                with self.distribute_strategy.scope():  # in which the model was made
                    exchange.refuse_strategies()
                _warn_of_summed_losses(self, process_set)
        in_fit = forgotten.in_fit.set(True)
        own = None
        # On one rank, only a callback that restores a checkpoint needs the variables so early.
        early = [c for c in callbacks if getattr(c, "_hvd_needs_variables", False)]
        if process_set is not None and (process_set.size() > 1 or early):
            checkpoints = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
            own = _Fit(self, process_set, checkpoints)
        token = _current.set(own)
        try:
            history = fit(self, *args, **kwargs)
        finally:
            _current.reset(token)
            forgotten.in_fit.reset(in_fit)
        if own is not None:
            agree.gather_json("fit has ended", None, own.process_set)
        return history

    return fit_together


def wrap_symbolic_build(symbolic_build: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``keras.Model._maybe_symbolic_build``, which fit calls before the callbacks begin."""

    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        own = _current.get()
        if own is not None and own.model is self and not own.has_begun:
            _begin(own, getattr(iterator, "_distributed_dataset", None))
        symbolic_build(self, iterator=iterator, data_batch=data_batch)

    return build


def legacy_data_module() -> Any:
    """The module of tf_keras whose ``get_data_handler`` fit calls before the callbacks begin."""
    from tf_keras.src.engine import data_adapter

    return data_adapter


def wrap_get_data_handler(get_data_handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``legacy_data_module().get_data_handler``."""

    def get(*args: Any, **kwargs: Any) -> Any:
        handler = get_data_handler(*args, **kwargs)
        own = _current.get()
        if own is not None and own.model is kwargs.get("model") and not own.has_begun:
            _begin(own, handler._dataset)
        return handler

    return get


def wrap_bar(set_params: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``keras.callbacks.ProgbarLogger.set_params``: by default one rank has the bar."""

    def set_params_of_rank(self: Any, params: Any) -> None:
        set_params(self, params)
        if params.get("verbose") != "auto" or settings.read().verbose_all:
            return
        own = _current.get()
        with contextlib.suppress(ValueError):  # this rank is in no set, or the model in several
            if own is not None and own.model is self.model:
                process_set: ProcessSet | None = own.process_set
            else:
                process_set = self.model and together.process_set_of(self.model)
            if process_set is not None and process_set.rank() > 0:
                self.verbose = 0

    return set_params_of_rank


def check_built(model: Any) -> None:
    """Checks, for a callback, that the model has its variables.

    Raises:
        ValueError: (on every rank) a rank could not create them before the first step.
    """
    own = _current.get()
    if own is not None and own.model is model and own.unbuilt:
        raise ValueError(
            f"model {model.name!r} has no variables yet, and its training step cannot be traced to "
            f"create them: {own.unbuilt}. Give the model an Input, or call it once on a batch, "
            "before fit."
        ) from own.problem


def dataset_of(model: Any) -> Any:
    """The ``tf.data.Dataset`` on which a running ``fit`` trains a model; None if it is another."""
    own = _current.get()
    is_known = own is not None and own.model is model and isinstance(own.dataset, tf.data.Dataset)
    return own.dataset if own is not None and is_known else None


def forget_functions(model: Any) -> None:
    """Makes a model trace its steps again."""
    model.test_function = model.predict_function = model.train_function = None
    made = model.make_train_function()
    if made is not None:  # tf_keras
        model.train_function = made


def wait_for_checkpoint(callback: Any) -> None:
    """Waits until the checkpoint is written, if all ranks have the callback."""
    own = _current.get()
    if own is not None and own.checkpoints_are_common and callback in own.checkpoints:
        agree.gather_json("checkpoint is written", None, own.process_set)


def _begin(own: _Fit, dataset: Any) -> None:
    own.has_begun, own.dataset = True, dataset
    model = own.model
    sync_batch_norm.synchronize_on(model._flatten_layers(), own.process_set)
    is_built = building.is_built(model) and together.has_built_optimizers(model)
    if isinstance(dataset, tf.data.Dataset) and not is_built:
        own.problem = building.build(model, dataset.element_spec)
    if not is_legacy and own.process_set.size() > 1:
        lookups.read_by_rows(model, model._flatten_layers())
    missing = own.problem is not None and bool(building.unbuilt(model) - {id(model)})
    told = f"{type(own.problem).__name__}: {own.problem}" if missing else None
    everyone = agree.gather_json("fit", [len(own.checkpoints), told], own.process_set)
    own.checkpoints_are_common = len({count for count, _ in everyone}) == 1
    own.unbuilt = agree.by_rank([text for _, text in everyone], own.process_set)
    data.check_passes(dataset, own.process_set)


def _warn_of_summed_losses(model: Any, process_set: ProcessSet) -> None:
    """Tells that averaged gradients of a loss that sums over the batch are N times too small.

    Raises:
        ValueError: that is so, and ``HVD_STRICT`` is set.
    """
    averages = any(r.options.op is ops.Average for r in together.reducers_of(model))
    losses = tf.nest.flatten(getattr(model, "loss", None))
    summed = [loss for loss in losses if getattr(loss, "reduction", None) == "sum"]
    if not averages or not summed:
        return
    text = (
        f"the loss {type(summed[0]).__name__} of model {model.name!r} sums over the batch "
        '(reduction="sum"), but the gradients are averaged over the ranks, so they are those of '
        f"one process divided by {process_set.size()}. Use reduction="
        '"sum_over_batch_size", or hvd.DistributedOptimizer(..., op=hvd.Sum).'
    )
    if settings.read().strict:
        raise ValueError(f"hvd_keras: {text}")
    if process_set.rank() == 0:
        log.warn_once(text)


def _process_set(model: Any, callbacks: list[Any]) -> ProcessSet | None:
    process_set = together.process_set_of(model)
    if process_set is None:
        # A train_step with hvd.DistributedGradientTape is recognised by callbacks of hvd_keras.
        for callback in callbacks:
            process_set = getattr(callback, "_hvd_process_set", process_set)
    return process_set


def _flat(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        return [one for part in callbacks for one in _flat(part)]
    return _flat(getattr(callbacks, "callbacks", None)) or [callbacks]
