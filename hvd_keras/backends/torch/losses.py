"""Weighs each rank's loss, so that the mean over the ranks is the loss of one process.

Keras divides a masked loss by the number of valid entries, and one with
``reduction="mean_with_sample_weight"`` by the sum of the weights: numbers n_r that differ by rank.
So each rank's is multiplied by N * n_r / sum(n_r). Losses that are summed are multiplied by N.
Validation weighs alike if all ranks validate together and average their metrics.
"""

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from hvd_keras.gradients import missing_calls
from hvd_keras.hooks import fits
from hvd_keras.runtime import agree, log, rank_info
from hvd_keras.runtime.keras import call_loss
from hvd_keras.runtime.process_sets import ProcessSet


@dataclasses.dataclass(frozen=True)
class Weighing:
    """The losses of a model that several ranks train."""

    model: Any
    process_set: ProcessSet
    averages: bool  # gradients are averaged, not summed
    validates: bool

    def is_exact(self) -> bool:
        """Whether all ranks take this step."""
        validation = fits.validation.get()
        return not self.validates or bool(validation and validation.is_together)


_weighing: contextvars.ContextVar[Weighing | None] = contextvars.ContextVar("losses", default=None)


def weighed(
    model: Any, process_set: ProcessSet, averages: bool, method: str
) -> AbstractContextManager[None]:
    """Weigh the losses of a model's steps: of ``method``, train_step or test_step."""
    return agree.within(_weighing, Weighing(model, process_set, averages, method == "test_step"))


def wrap_call(loss_call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``keras.losses.Loss.__call__``, which every loss and every output calls."""

    @functools.wraps(loss_call)
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        own = _weighing.get()
        # Keras computes shapes on a device without values.
        if getattr(getattr(y_pred, "device", None), "type", "meta") == "meta":
            return loss_call(self, y_true, y_pred, sample_weight)
        if own is None:
            is_loop = rank_info.is_initialized() and not missing_calls.in_fit.get()
            if not is_loop or rank_info.size() == 1 or not torch.is_grad_enabled():
                return loss_call(self, y_true, y_pred, sample_weight)
        with agree.within(_weighing, None):  # a loss may compute others
            value, values = call_loss(self, loss_call, y_true, y_pred, sample_weight)
        if own is None:
            _note_unweighed(self, values, y_pred, sample_weight)
            return value
        return _weigh(own, self, value, values, y_pred, sample_weight)

    return call


def _note_unweighed(loss: Any, values: Any, y_pred: Any, sample_weight: Any) -> None:
    if loss.reduction in (None, "none", "sum"):
        how = "is summed, not averaged, over the rows"
    elif _weights(loss, values, y_pred, sample_weight):
        how = "is divided by a number that differs by rank, such as that of entries behind a mask"
    else:
        return
    missing_calls.warn_if_averaged(
        f"the loss {loss.name} {how}, so the mean of the ranks' gradients is not that of one "
        "process. fit and train_on_batch weigh it; a loop of your own does not: use "
        "reduction='sum_over_batch_size' without masks, or hvd.DistributedOptimizer(…, op=hvd.Sum) "
        "and divide by numbers over all ranks."
    )


def _weights(loss: Any, values: Any, y_pred: Any, sample_weight: Any) -> list[torch.Tensor]:
    """Return what Keras divides a loss by, if it is not the number of rows."""
    if values is None or not values.dim():
        return []
    masks = [getattr(tensor, "_keras_mask", None) for tensor in (y_pred, values)]
    if loss.reduction == "mean_with_sample_weight":
        masks.append(sample_weight)
    return [torch.as_tensor(mask).to(torch.float64) for mask in masks if mask is not None]


def _weigh(
    own: Weighing, loss: Any, value: Any, values: Any, y_pred: Any, sample_weight: Any
) -> Any:
    reduction, size = loss.reduction, own.process_set.size()
    if reduction in (None, "none") and not own.validates:
        raise NotImplementedError(
            f"loss {loss.name} has reduction={reduction!r}, which hvd_keras does not distribute on "
            "PyTorch. Use sum_over_batch_size or sum."
        )
    if reduction == "sum":
        return value * size if own.averages and own.is_exact() else value
    if values is not None and not values.dim():
        log.warn_once(
            f"the loss {loss.name} is one number for a batch. If it is no mean over the batch's "
            "rows, the mean of the ranks' losses is not the loss that one process has."
        )
        return value
    weights = _weights(loss, values, y_pred, sample_weight)
    if own.validates and weights:
        fits.weighed.add(own.model)
    if not weights or not own.is_exact():
        return value
    shape = values.shape
    # Gradients of all ranks count alike; in validation a rank's loss counts by its rows.
    rows = len(y_pred) if own.validates else 1
    mine = np.array([float(math.prod(_fit(w, shape) for w in weights).sum()), rows])
    call = {"name": f"weight of loss {loss.name}", "process_set": own.process_set.id()}
    (total,) = agree.run("allreduce", [mine], reduction="Sum", **call)
    # This rank's share of the entries over its share of the rows, which is 1 / N in training.
    share = mine / np.maximum(total, np.finfo(float).tiny)
    return value * float(share[0] / share[1])


def _fit(weight: torch.Tensor, shape: Any) -> torch.Tensor:
    """Bring a mask or weights to the shape of the loss's values, as Keras does."""
    if weight.dim() == len(shape) + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    while weight.dim() < len(shape):
        weight = weight.unsqueeze(-1)
    return weight.expand(shape)
