"""Finds out by the rows of a batch whether its loss follows from the losses of its parts.

If it does not, the ranks do not train as one process. Names and operations do not tell.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvd_keras.gradients import model_ranks
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import flatten, is_of_keras, keras, overrides, replaced
from hvd_keras.runtime.reductions import Average

TOLERANCE = 1e-4  # relative to the largest value
_TOLD = {
    "mixes": "combines rows of the batch other than by a mean, and each rank has its rows alone, "
    "so the ranks do not train as one process. Compute each row from itself, or, in code of your "
    "own, from those of all ranks: hvd.allgather(x).",
    "sum": "adds up the rows of the batch, and the ranks' gradients are averaged, so they are "
    "smaller than those of one process. Divide the sum by the number of this rank's rows, or use "
    "op=hvd.Sum.",
}


def mix(
    name: str,
    losses_of: Sequence[Callable[[slice], Any]],
    rows: int,
    is_sum: bool,
    process_set: agree.Ranks,
) -> bool:
    """Whether on a rank the loss of its rows does not follow from those of the halves.

    Args:
        name: of the loss.
        losses_of: each returns, for other values of the rows of a slice, a value for each of them,
            or one number, their mean or sum.
        rows: this rank's number of rows.
        is_sum: whether one number is a sum.
        process_set: the ranks that compute the loss together.
    """
    mixes, half = False, rows // 2
    with contextlib.suppress(Exception):  # it may need whole batches
        for loss_of in losses_of:
            one, other, both = map(loss_of, (slice(half), slice(half, 2 * half), slice(2 * half)))
            joined = np.concatenate([one, other]) if both.ndim else one + other
            if not both.ndim and not is_sum:
                joined = joined / 2
            largest = max(np.abs(part).max(initial=0) for part in (one, other, both))
            mixes |= bool(np.abs(joined - both).max(initial=0) > TOLERANCE * largest)
    call = {"name": f"rows of loss {name}", "process_set": process_set.id()}
    (found,) = agree.run("allreduce", [np.array([mixes])], reduction="Max", **call)
    return bool(found[0])


@dataclasses.dataclass
class Trial:
    """What a model trains by is tried; losses of ``keras.losses`` are means of predictions."""

    subject: str = ""  # code in it that is not Keras's
    kind: str = ""  # "mixes" rows, or is their "sum"
    adds_up: bool = False  # a loss is a sum, or has a value for each row
    constants: list[tuple[str, str]] | None = None  # floating-point ones: hashes, and what they are
    compiled: Any = None  # what ``compile`` was given

    def what_mixes(self, model: Any) -> str:
        """Say what trains by more than a mean over the rows of a batch; "" if nothing does."""
        averages = {reducer.op for reducer in model_ranks.reducers_of(model)} == {Average}
        is_told = self.kind == "mixes" or (self.kind and averages)
        return f"{self.subject} {_TOLD[self.kind]}" if is_told else ""


#: That which runs.
trial: contextvars.ContextVar[Any] = contextvars.ContextVar("trial", default=None)


def known(model: Any) -> Trial | None:
    """The trial of a model, unless it was compiled again."""
    found: Trial | None = vars(model).get("_hvd_trial")
    return found if found and found.compiled is getattr(model, "_compile_config", None) else None


def begin(model: Any) -> tuple[Trial, str, bool]:
    """Begin the trial of a model, once after each ``compile``.

    Returns:
        The trial; which method of ``keras.Model`` the model has replaced, or ""; and whether it has
        layers that are not known to work on each row.
    """
    layers = [*model._flatten_layers()]
    parts = [*layers, *(part for one in layers for part in getattr(one, "operations", ()))]
    others = {id(part): part for part in parts if not _works_by_rows(part)}.values()
    name = next((name for name in ("train_step", "compute_loss") if overrides(model, name)), "")
    names = [f"{type(one).__name__} {one.name!r}" for one in others if one is not model]
    # With its name, so that each model of a search is told.
    subject = f"{name or 'call'} of {type(model).__name__} {model.name!r}"
    subject = " or ".join(names[:3]) if names and not name else subject
    found = Trial(subject, compiled=getattr(model, "_compile_config", None))
    vars(model)["_hvd_trial"] = found  # Keras tracks what is assigned
    return found, name, bool(others)


_MIXING = tuple(getattr(keras.layers, name, ()) for name in ("MixUp", "CutMix"))  # by chance


@contextlib.contextmanager
def trying(found: Trial, model: Any) -> Iterator[None]:
    """Let steps of a model update nothing, without what is weighed or documented by itself."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(agree.within(agree.is_building, True))
        stack.enter_context(agree.within(trial, found))
        for optimizer in model_ranks.optimizers_of(model, within=True):
            for method in ("apply", "apply_gradients"):
                stack.enter_context(replaced(optimizer, method, lambda *_, **__: None))
        for layer in model._flatten_layers():
            stack.enter_context(replaced(layer, "activity_regularizer", None))
            if isinstance(layer, (keras.layers.BatchNormalization, *_MIXING)):
                inferring = functools.partial(_infer, layer.call)  # type: ignore[attr-defined]
                stack.enter_context(replaced(layer, "call", inferring))
        yield


def _infer(call: Any, *args: Any, training: Any = None, **kwargs: Any) -> Any:
    return call(*args, training=False, **kwargs)


def of_losses(model: Any, data: Any) -> Any:
    """What Keras's own step trains by."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    options = {"training": False} if getattr(model, "_call_has_training_arg", True) else {}
    return model.compute_loss(x=x, y=y, y_pred=model(x, **options), sample_weight=weight)


def kind_of_losses(
    losses: Sequence[float], alone: float, tolerance: float, may_be_mean: bool
) -> str:
    """Whether losses of parts A and B show that rows are mixed, or are summed; otherwise "".

    Args:
        losses: of the rows of A and B, B and A, A and A, B and B, in this order, so that each row
            is at each place: random numbers belong to places.
        alone: of those of A.
        tolerance: relative to the largest.
        may_be_mean: a sum may be divided by a number of rows.
    """
    largest = np.abs(losses).max()
    if not np.isfinite(largest):
        return ""
    if abs(losses[0] + losses[1] - losses[2] - losses[3]) > tolerance * largest:
        return "mixes"
    return "sum" if not may_be_mean and abs(losses[2] - alone) > tolerance * largest else ""


def _works_by_rows(part: Any) -> bool:
    """Whether a part of a model is known to compute each row of its output from one of its input.

    True for Keras's layers, unless they have a function or an axis that may say otherwise. Batch
    normalisation and random layers use other rows in training alone, as documented.
    """
    axes = flatten([getattr(part, name, None) for name in ("axis", "axes")])
    functions = [value for value in vars(part).values() if hasattr(value, "__code__")]
    return (
        all(is_of_keras(home) for home in (type(part), *functions))
        and isinstance(part, keras.layers.Layer)
        and type(part).__name__ not in ("Lambda", "MelSpectrogram")  # decibels below the loudest
        and not any(isinstance(axis, int) and (axis == 0 or axis < -1) for axis in axes)
    )
