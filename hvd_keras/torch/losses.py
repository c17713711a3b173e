"""Weighs each rank's loss, as ``patches.losses`` does and says, on torch's tensors."""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.gradients import missing_calls
from hvd_keras.runtime import agree, rank_info
from hvd_keras.runtime.keras import call_loss, divisors, is_of_keras, replaced
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.torch import trials
from hvd_keras.torch.collectives import allgather
from hvd_keras.training import fit_state, halves
from hvd_keras.training.fit_state import Weighing

# Regularizers that add up rows; the mean of the ranks' is that of one process.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_weighing: contextvars.ContextVar[Weighing | None] = contextvars.ContextVar("losses", default=None)


def weighed(
    model: Any, process_set: ProcessSet, averages: bool, method: str
) -> AbstractContextManager[None]:
    """Weigh the losses of a model's steps: of ``method``, train_step or test_step."""
    own = Weighing(model, process_set, averages, method == "test_step")
    if model.jit_compile:  # torch.compile cannot trace that a context variable changes
        return agree.within(_weighing, own)
    one_step = getattr(model, method)

    @functools.wraps(one_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if method == "train_step":
                stack.enter_context(trials.checked(model, args[0], process_set))
            for layer in model._flatten_layers():
                local = getattr(layer, "activity_regularizer", None)
                if averages and local is not None and type(local) not in _SUMS:
                    of_all = functools.partial(_regularize, own, layer.path, local)
                    stack.enter_context(replaced(layer, "activity_regularizer", of_all))
            stack.enter_context(agree.within(_weighing, own))  # callbacks compute this rank's
            return one_step(*args, **kwargs)

    step._hvd_alone = one_step  # type: ignore[attr-defined]  # for ``overrides``
    return replaced(model, method, step)


def call(loss_call: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Replace ``keras.losses.Loss.__call__``, which every loss and every output calls."""
    own = _weighing.get()
    if (trial := halves.trial.get()) is not None:
        value = loss_call(loss, y_true, y_pred, sample_weight)
        trial.adds_up |= loss.reduction in (None, "none", "sum")
        rows = torch.as_tensor(y_pred).to(value.dtype)
        return value if value.dim() else torch.mean(rows + rows**2)
    # Keras computes shapes on a device without values, or if it cannot, of equal ones.
    place = getattr(getattr(y_pred, "device", None), "type", "meta")
    if place == "meta" or agree.is_building.get():
        return loss_call(loss, y_true, y_pred, sample_weight)
    if own is None:
        is_loop = not missing_calls.in_fit.get() and rank_info.is_initialized()
        if not is_loop or rank_info.size() == 1 or not torch.is_grad_enabled():
            return loss_call(loss, y_true, y_pred, sample_weight)
    arguments = y_true, y_pred, sample_weight
    with agree.within(_weighing, None):  # a loss may compute others

        def value_of(*some: Any) -> Any:
            value, values = call_loss(loss, loss_call, *some)
            return value if values is None or not values.dim() else values

        is_sum = loss.reduction == "sum"
        exact = own if own is not None and own.is_exact() else None
        if exact and _mixes(exact, loss, loss.name, value_of, arguments, is_sum):
            return loss_call(loss, *_of_all_ranks(exact, f"loss {loss.name}", arguments))
        value, values = call_loss(loss, loss_call, *arguments)
    if own is None:
        _note_unweighed(loss, values, y_pred, sample_weight)
        return value
    return _weigh(own, loss, value, values, y_pred, sample_weight)


def _mixes(
    own: Weighing,
    key: Any,
    name: str,
    value_of: Callable[..., Any],
    arguments: Sequence[Any],
    is_sum: bool = False,
) -> bool:
    """Whether what ``key`` computes is no mean or sum over rows, which is found out once."""
    known = vars(key).setdefault("_hvd_mixes_rows", {})
    number = own.process_set.id()
    if number not in known:
        known[number] = _halves_differ(own, name, value_of, arguments, is_sum)
    return bool(known[number])


def update(
    update_alone: Any, metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Replace ``keras.metrics.MeanMetricWrapper.update_state``.

    A function that gives no number for each row gets the rows of all ranks.
    """
    own, function, arguments = _weighing.get(), metric._fn, (y_true, y_pred, sample_weight)
    if own is None or is_of_keras(function) or not own.is_exact() or agree.is_building.get():
        return update_alone(metric, *arguments)

    def value_of(*given: Any) -> Any:
        return function(*given, **metric._fn_kwargs)

    with agree.within(_weighing, None):
        if _mixes(own, metric, metric.name, value_of, arguments[:2]):
            arguments = _of_all_ranks(own, f"metric {metric.name}", arguments)
        return update_alone(metric, *arguments)


def _regularize(own: Weighing, path: str, regularizer: Any, output: Any) -> Any:
    """A regularizer of all ranks' activities, which Keras divides by this rank's rows."""
    is_meta = getattr(getattr(output, "device", None), "type", "meta") == "meta"
    if is_meta or not own.is_exact() or agree.is_building.get():
        return regularizer(output)
    if _mixes(own, regularizer, path, regularizer, [output], is_sum=True):
        (every,) = _of_all_ranks(own, f"regularizer {path}", [output])
        return regularizer(every) / own.process_set.size()
    return regularizer(output)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _halves_differ(
    own: Weighing, name: str, value_of: Callable[..., Any], arguments: Sequence[Any], is_sum: bool
) -> bool:
    """Compare ``value_of`` all rows, of predictions or of an output, with that of the halves."""

    def rows_of(given: Sequence[Any]) -> int:
        return len(keras.tree.flatten(given[:2][-1])[0])

    def cut(rows: slice) -> Any:
        def part(x: Any) -> Any:
            # A copy: Keras multiplies weights by the mask in place.
            is_number = x is None or not torch.as_tensor(x).dim()
            return x if is_number else torch.as_tensor(x)[rows].clone()

        return keras.tree.map_structure(part, arguments)

    shapes = [
        list(torch.as_tensor(x).shape[1:]) for x in keras.tree.flatten(arguments) if x is not None
    ]
    gathered = agree.gather_json(f"shapes of {name}", [rows_of(arguments), shapes], own.process_set)
    with torch.no_grad():
        # One row has no halves, but the first ones of all ranks have.
        if min(gathered)[0] < 2 and all(theirs[1] == shapes for theirs in gathered):
            arguments = _of_all_ranks(own, f"rows of {name}", cut(slice(2)))

        def of(rows: slice, changed: bool = False) -> Any:
            given = list(cut(rows))
            for i, how in enumerate((_marked, _scaled)[-len(given) :] if changed else ()):
                given[i] = keras.tree.map_structure(functools.partial(how, rows), given[i])
            return torch.as_tensor(value_of(*given)).cpu().double().numpy()

        # At first, labels and predictions may be so equal that each half has the loss of both.
        ways = of, functools.partial(of, changed=True)
        return halves.mix(name, ways, rows_of(arguments), is_sum, own.process_set)


def _scaled(rows: slice, x: Any) -> Any:
    """Multiply each row of a slice by a factor of its own, up to 1."""
    if not (torch.is_tensor(x) and x.is_floating_point() and x.dim()):
        return x
    factors = 1 / torch.arange(1 + (rows.start or 0), 1 + rows.stop, device=x.device)
    return x * factors.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))


def _marked(rows: slice, x: Any) -> Any:
    """Make each third row of a slice 1, the others 0: labels that are valid for all losses."""
    marks = torch.arange(rows.start or 0, rows.stop) % 3 == 0
    shape = [-1, *[1] * (torch.as_tensor(x).dim() - 1)]
    return torch.zeros_like(x) + marks.to(x.device, x.dtype).reshape(shape)


def _note_unweighed(loss: Any, values: Any, y_pred: Any, sample_weight: Any) -> None:
    if loss.reduction in (None, "none", "sum"):
        how = "is summed, not averaged, over the rows"
    elif values is not None and values.dim() and divisors(loss, values, y_pred, sample_weight):
        how = "is divided by a number that differs by rank, such as that of entries behind a mask"
    else:
        return
    missing_calls.warn_if_averaged(
        f"the loss {loss.name} {how}, so the mean of the ranks' gradients is not that of one "
        "process. fit and train_on_batch weigh it; a loop of your own does not: use "
        "reduction='sum_over_batch_size' without masks, or hvd.DistributedOptimizer(…, op=hvd.Sum) "
        "and divide by numbers over all ranks."
    )


def _of_all_ranks(own: Weighing, name: str, arguments: Sequence[Any]) -> Any:
    def gathered(part: Any) -> Any:
        if part is None or not torch.as_tensor(part).dim():
            return part
        rows = allgather(part, name=name, process_set=own.process_set)
        rows._keras_mask = gathered(getattr(part, "_keras_mask", None))
        return rows

    return keras.tree.map_structure(gathered, arguments)


def _weigh(
    own: Weighing, loss: Any, value: Any, values: Any, y_pred: Any, sample_weight: Any
) -> Any:
    reduction, size = loss.reduction, own.process_set.size()
    if reduction in (None, "none") and not own.validates:
        raise NotImplementedError(
            f"loss {loss.name} has reduction={reduction!r}, which hvd_keras does not distribute on "
            "PyTorch. Use sum_over_batch_size or sum."
        )
    if reduction == "sum" and not own.counts_rows():
        # As a tensor: ``trials`` takes Python numbers for the script's.
        factor = torch.tensor(size, dtype=value.dtype)
        return value * factor if own.averages and own.is_exact() else value
    has_rows = values is not None and values.dim()
    weights = divisors(loss, values, y_pred, sample_weight) if has_rows else []
    weights = [] if reduction == "sum" else weights
    if own.validates and weights:
        fit_state.weighed.add(own.model)
    if not own.is_exact() or not (weights or own.counts_rows()):
        return value
    fitted = [_fit(weight, values.shape) for weight in weights]
    entries = math.prod(fitted).sum() if fitted else None
    of_entries, of_rows = _shares(own, loss, entries, len(keras.tree.flatten(y_pred)[0]))
    of_entries = 1.0 if reduction == "sum" else of_entries  # it is divided by none
    logged, weighed = of_entries / of_rows, of_entries * size
    if own.validates or logged == weighed:
        return value * logged
    return value.detach() * (logged - weighed) + value * torch.tensor(weighed, dtype=value.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _shares(own: Weighing, loss: Any, entries: Any, rows: int) -> tuple[float, float]:
    """Return this rank's shares of the entries and of the rows.

    In logs a rank counts by its rows, in gradients all count alike.
    """
    mine = np.array([rows if entries is None else float(entries), rows])
    call = {"name": f"weight of loss {loss.name}", "process_set": own.process_set.id()}
    (total,) = agree.run("allreduce", [mine], reduction="Sum", **call)
    share = mine / np.maximum(total, np.finfo(float).tiny)
    return float(share[0]), float(share[1])


def _fit(weight: torch.Tensor, shape: Any) -> torch.Tensor:
    """Bring a mask or weights to the shape of the loss's values, as Keras does."""
    weight = torch.as_tensor(weight).to(torch.float64)
    if weight.dim() == len(shape) + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    while weight.dim() < len(shape):
        weight = weight.unsqueeze(-1)
    return weight.expand(shape)
