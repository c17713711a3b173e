"""Finds out on the first batch whether a model trains by more than a mean over its rows.

Losses and layers are tried on parts of the batch. A ``train_step`` of one's own, whose Python code
would see that, is not: only whether it sums rows, by the graph of the loss that it trains by.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.gradients import missing_calls
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import replaced
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.training import halves, variables


@contextlib.contextmanager
def checked(model: Any, data: Any, process_set: ProcessSet) -> Iterator[None]:
    """Tell on all ranks if a step of training combines rows or adds them up; once a ``compile``."""
    seen = vars(model).setdefault("_hvd_tried", set())
    if halves.known(model) and process_set.id() in seen:
        yield
        return
    seen.add(process_set.id())
    found, name, has_others = halves.begin(model)
    if name == "train_step":
        with replaced(torch.autograd, "backward", _watching(found, torch.autograd.backward, data)):
            yield
    elif name or has_others:
        try:
            with halves.trying(found, model), _undone(model) as undo:
                found.kind = _kind(found, model, data, undo)
        except Exception as error:  # other ranks have the same, or wait for what it is
            log.logger.debug("%s cannot be tried on parts of a batch: %r", found.subject, error)
    kinds = agree.gather_json("kind of a step", found.kind, process_set)
    found.kind = min(filter(None, kinds), default="")
    if told := found.what_mixes(model):
        missing_calls.tell(told, process_set)
    if name != "train_step":
        yield


def _watching(found: halves.Trial, backward: Callable[..., Any], data: Any) -> Callable[..., Any]:
    """``torch.autograd.backward``, which looks for sums of the rows of some data."""
    counts = {len(one) for one in keras.tree.flatten(data) if torch.is_tensor(one) and one.dim()}

    def watch(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for one in [tensors] if torch.is_tensor(tensors) else tensors:
            if _sums(one, counts - {1}):
                found.kind = "sum"
        return backward(tensors, *args, **kwargs)

    return watch


# What passes on a loss, neither multiplied nor divided.
_PASSING = ("Add", "Sub", "Neg", "ToCopy", "View", "Clone", "Squeeze", "Unsafe")
_SUM = 2  # a reduction of torch's functions


def _reached(node: Any, passing: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """Yield a node of a graph and those behind it, with names, through nodes of these names."""
    waiting = [node]
    while waiting:
        if (node := waiting.pop()) is None:
            continue
        name = type(node).__name__
        yield node, name
        if name.startswith(passing):
            waiting += [following for following, _ in node.next_functions]


def _sums(loss: Any, counts: set[int]) -> bool:
    """Whether a loss contains a sum over one of so many rows, as it is."""
    for node, name in _reached(loss.grad_fn, _PASSING):
        sizes: Any = getattr(node, "_saved_self_sym_sizes", ()) if name == "SumBackward0" else ()
        is_of_rows = bool(sizes) and int(sizes[0]) in counts and not _is_of_weights(node)
        if is_of_rows or getattr(node, "_saved_reduction", 0) == _SUM:
            return True
    return False


def _is_of_weights(node: Any) -> bool:
    """Whether a number is made of weights alone, element by element, as regularizers are."""
    elementwise = ("Sum", "Pow", "Mul", "Abs", "View", "ToCopy", "AccumulateGrad")
    return all(name.startswith(elementwise) for _, name in _reached(node, elementwise))


def _is_scaled(loss: Any) -> bool:
    """Whether a sum in a loss may be divided by this rank's number of rows."""
    return any(name.startswith(("Div", "Mul")) for _, name in _reached(loss.grad_fn, _PASSING))


def _kind(found: halves.Trial, model: Any, data: Any, undo: Callable[[], None]) -> str:
    tensors = [one for one in keras.tree.flatten(data) if torch.is_tensor(one) and one.dim()]
    counts = {len(one) for one in tensors}
    if len(counts) != 1 or (half := min(counts) // 2) == 0:
        return ""
    one, other = np.arange(half), np.arange(half, 2 * half)

    def loss_of(*parts: Any) -> float:
        rows = torch.as_tensor(np.concatenate(parts))

        def part(tensor: Any) -> Any:
            is_of_rows = torch.is_tensor(tensor) and tensor.dim()
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
    may_be_mean = found.adds_up or any(map(_is_scaled, losses))
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
    drawn = random.getstate(), np.random.get_state()

    def undo() -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for layer, before in zip(layers, numbers, strict=True):
            for name in plain(layer):
                del vars(layer)[name]
            vars(layer).update(before)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])

    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus), agree.within(agree.refuses, True):
        try:
            yield undo
        finally:
            undo()
            for metric in model.metrics:
                if not any(metric is one for one in metrics):
                    metric.reset_state()
