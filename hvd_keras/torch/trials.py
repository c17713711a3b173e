"""Finds out on the first batch whether a model trains by more than a mean over its rows.

Losses and layers are tried on parts of the batch. A ``train_step`` of one's own, whose Python code
would see that, is not: only whether it sums rows, by the graph of the loss that it trains by.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.gradients import missing_calls
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import replaced
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.saving import per_rank
from hvd_keras.training import halves, variables
from hvd_keras.training.fit_state import may_be_number_of_rows


@contextlib.contextmanager
def checked(model: Any, data: Any, process_set: ProcessSet) -> Iterator[None]:
    """Tell on all ranks if a step of training combines rows or adds them up; once a ``compile``."""
    seen = vars(model).setdefault("_hvd_tried", set())
    if halves.known(model) and process_set.id() in seen:
        yield
        return
    seen.add(process_set.id())
    found, name, has_others = halves.begin(model)
    rows = [one for one in keras.tree.flatten(data) if torch.is_tensor(one) and one.dim()]
    counts, backward = set(map(len, rows)) - {1}, torch.autograd.backward
    passes = functools.partial(_passes, counts, process_set.size())

    def watch(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if torch.is_tensor(tensors) else tensors
        found.kind = "sum" if any(_sums(one, counts, passes) for one in given) else found.kind
        return backward(tensors, *args, **kwargs)

    if name == "train_step":
        with replaced(torch.autograd, "backward", watch):
            yield
    elif name or has_others:
        try:
            with halves.trying(found, model), _undone(model) as undo:
                found.kind = _kind(found, model, data, counts, passes, undo)
        except Exception as error:  # other ranks have the same, or wait for what it is
            log.logger.debug("%s cannot be tried on parts of a batch: %r", found.subject, error)
    kinds = agree.gather_json("kind of a step", found.kind, process_set)
    found.kind = min(filter(None, kinds), default="")
    if told := found.what_mixes(model):
        missing_calls.tell(told, process_set)
    if name != "train_step":
        yield


# What passes on a loss, and what scales it.
_PASSING = ("Add", "Sub", "Neg", "ToCopy", "View", "Clone", "Squeeze", "Unsafe")
_SCALING = ("Div", "Mul")
_SUM = 2  # a reduction of torch's functions


def _reached(node: Any, passes: Callable[[Any, str], bool]) -> Iterator[tuple[Any, str]]:
    """Yield a node of a graph and those behind it, with names, through nodes that pass."""
    waiting = [node]
    while waiting:
        if (node := waiting.pop()) is None:
            continue
        name = type(node).__name__
        yield node, name
        if passes(node, name):
            waiting += [following for following, _ in node.next_functions]


def _passes(counts: set[int], ranks: int, node: Any, name: str) -> bool:
    """Whether a node passes on a loss, perhaps divided by what is no number of a rank's rows."""
    if not name.startswith(_SCALING):
        return name.startswith(_PASSING)
    number = _divisor(node, name)
    may_be_rows = [may_be_number_of_rows(ranks, number or 0.0, n) for n in counts]
    return number is not None and bool(counts) and not any(may_be_rows)


def _divisor(node: Any, name: str) -> float | None:
    """The Python number by which a node divides; None: it divides by a tensor, perhaps of rows."""
    other = getattr(node, "_saved_other", None)
    if other is None or other.dim() or other.dtype not in (torch.float64, torch.int64):
        return None
    # A tensor would decide the dtype of a result; a number does not.
    small = torch.float16 if other.is_floating_point() else torch.int8
    if torch.result_type(torch.ones((), dtype=small), other) is not small:
        return None
    return round(float(other) if name.startswith("Div") else 1 / (float(other) or math.inf), 6)


def _sums(loss: Any, counts: set[int], passes: Callable[[Any, str], bool]) -> bool:
    """Whether a loss contains a sum over one of so many rows, not divided by their number."""
    for node, name in _reached(loss.grad_fn, passes):
        sizes: Any = getattr(node, "_saved_self_sym_sizes", ()) if name == "SumBackward0" else ()
        is_of_rows = bool(sizes) and int(sizes[0]) in counts and not _is_of_weights(node)
        if is_of_rows or getattr(node, "_saved_reduction", 0) == _SUM:
            return True
    return False


def _is_of_weights(node: Any) -> bool:
    """Whether a number is made of weights alone, element by element, as regularizers are."""
    elementwise = ("Sum", "Pow", "Mul", "Abs", "View", "ToCopy", "AccumulateGrad")
    every = _reached(node, lambda _, name: name.startswith(elementwise))
    return all(name.startswith(elementwise) for _, name in every)


def _kind(
    found: halves.Trial, model: Any, data: Any, counts: set[int], passes: Any, undo: Any
) -> str:
    if len(counts) != 1:
        return ""
    half = min(counts) // 2
    one, other = np.arange(half), np.arange(half, 2 * half)

    def loss_of(*parts: Any) -> float:
        rows = torch.as_tensor(np.concatenate(parts))

        def part(tensor: Any) -> Any:
            is_of_rows = torch.is_tensor(tensor) and tensor.dim() and len(tensor) in counts
            return tensor[rows.to(tensor.device)] if is_of_rows else tensor

        losses.append(halves.of_losses(model, keras.tree.map_structure(part, data)))
        return float(losses[-1].detach().double().sum())

    def again(*parts: Any) -> float:
        undo()
        return loss_of(*parts)

    losses: list[Any] = []
    values = [again(a, b) for a, b in ((one, other), (other, one), (one, one), (other, other))]
    alone = again(one)
    if loss_of(one) != alone:  # it draws random numbers
        return ""
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    tolerance = 0.02 if any("16" in dtype for dtype in dtypes) else halves.TOLERANCE
    may_be_mean = found.adds_up or any(
        name.startswith(_SCALING) and not passes(node, name)
        for loss in losses
        for node, name in _reached(loss.grad_fn, passes)
    )
    return halves.kind_of_losses(values, alone, tolerance, may_be_mean)


@contextlib.contextmanager
def _undone(model: Any) -> Iterator[Callable[[], None]]:
    """Undo at the end, and when it is asked for, what layers and losses change."""
    layers, metrics = list(model._flatten_layers()), list(model.metrics)
    every = [*model.variables, *(v for metric in metrics for v in metric.variables)]
    every += variables.global_seed_states()
    tensors = [*(variable.value for variable in every), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]

    def plain(layer: Any) -> dict[str, Any]:
        return {k: v for k, v in vars(layer).items() if isinstance(v, (bool, int, float, str))}

    numbers = [plain(layer) for layer in layers]
    drawn = per_rank.random_state()

    def undo() -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for layer, before in zip(layers, numbers, strict=True):
            for name in plain(layer):
                del vars(layer)[name]
            vars(layer).update(before)
        per_rank.set_random_state(drawn)

    with agree.within(agree.refuses, True):
        try:
            yield undo
        finally:
            undo()
            for metric in model.metrics:
                if not any(metric is one for one in metrics):
                    metric.reset_state()
