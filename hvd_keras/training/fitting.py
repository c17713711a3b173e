"""What happens around ``fit`` when several ranks train the model.

Before the callbacks begin, the model gets its variables and the ranks compare what they must have
in common. When ``fit`` returns, the files that one rank has written in it are there for all.
"""

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras import agree, rank_info
from hvd_keras._keras import keras
from hvd_keras.process_sets import ProcessSet
from hvd_keras.training import building, forgotten, sync_batch_norm, together


@dataclasses.dataclass
class _Fit:
    """A ``fit`` that is running on all ranks of a process set."""

    model: Any
    process_set: ProcessSet
    checkpoints: list[Any]  # this rank's keras.callbacks.ModelCheckpoint
    has_begun: bool = False
    # Whether all ranks have as many of them, so that they can wait for each other in there.
    checkpoints_are_common: bool = False
    # Why some rank's model has no variables yet, by rank, and what this rank's has raised.
    unbuilt: str = ""
    problem: Exception | None = None


_current: contextvars.ContextVar[_Fit | None] = contextvars.ContextVar("fit", default=None)


def wrap_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
    """For ``keras.Model.fit``."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        process_set = None
        callbacks: list[Any] = []
        if rank_info.is_initialized():
            try:
                given = signature.bind(self, *args, **kwargs).arguments.get("callbacks")
            except TypeError:
                return fit(self, *args, **kwargs)  # which says what is wrong
            callbacks = _flat(given)
            process_set = _process_set(self, callbacks)
        in_fit = forgotten.in_fit.set(True)
        own = None
        # Alone, only who restores a checkpoint needs the variables so early.
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
    """For ``keras.Model._maybe_symbolic_build``, which fit calls before the callbacks begin."""

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
    """For ``legacy_data_module().get_data_handler``."""

    def get(*args: Any, **kwargs: Any) -> Any:
        handler = get_data_handler(*args, **kwargs)
        own = _current.get()
        if own is not None and own.model is kwargs.get("model") and not own.has_begun:
            _begin(own, handler._dataset)
        return handler

    return get


def check_built(model: Any) -> None:
    """For callbacks that need a model's variables when they begin.

    Raises:
        ValueError: a rank could not make them before the first step; on every rank.
    """
    own = _current.get()
    if own is not None and own.model is model and own.unbuilt:
        raise ValueError(
            f"model {model.name!r} has no variables yet, and its training step cannot be traced to "
            f"make them: {own.unbuilt}. Give the model an Input, or call it once on a batch, "
            "before fit."
        ) from own.problem


def forget_functions(model: Any) -> None:
    """Lets a model trace its steps anew."""
    model.test_function = model.predict_function = model.train_function = None
    made = model.make_train_function()
    if made is not None:  # tf_keras
        model.train_function = made


def wait_for_checkpoint(callback: Any) -> None:
    """Where all ranks have the callback, its file is there for all when they go on."""
    own = _current.get()
    if own is not None and own.checkpoints_are_common and callback in own.checkpoints:
        agree.gather_json("checkpoint is written", None, own.process_set)


def _begin(own: _Fit, dataset: Any) -> None:
    own.has_begun = True
    model = own.model
    sync_batch_norm.synchronize_on(model._flatten_layers(), own.process_set)
    if isinstance(dataset, tf.data.Dataset) and not building.is_built(model):
        own.problem = building.build(model, dataset.element_spec)
    missing = own.problem is not None and bool(building.unbuilt(model) - {id(model)})
    told = f"{type(own.problem).__name__}: {own.problem}" if missing else None
    everyone = agree.gather_json("fit", [len(own.checkpoints), told], own.process_set)
    own.checkpoints_are_common = len({count for count, _ in everyone}) == 1
    own.unbuilt = "; ".join(
        f"rank {rank}: {text}"
        for rank, (_, text) in zip(own.process_set.ranks, everyone, strict=True)
        if text is not None
    )


def _process_set(model: Any, callbacks: list[Any]) -> ProcessSet | None:
    process_set = together.process_set_of(model)
    if process_set is None:
        # A train_step with hvd.DistributedGradientTape: known by our callbacks.
        for callback in callbacks:
            process_set = getattr(callback, "_hvd_process_set", process_set)
    return process_set


def _flat(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        return [one for part in callbacks for one in _flat(part)]
    return _flat(getattr(callbacks, "callbacks", None)) or [callbacks]
