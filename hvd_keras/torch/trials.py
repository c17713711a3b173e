"""Tries what a model trains by on parts of its first batch, as ``training.step_trials`` does."""

import contextlib
import functools
import io
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
from hvd_keras.training import halves


def check(model: Any, train_step: Callable[[Any], Any], data: Any, process_set: ProcessSet) -> None:
    """Tell on all ranks, once, if a model trains by more than a mean over the rows of a batch.

    Python code of a step, such as what it prints, runs for the parts, too; what it assigns to
    variables and to numbers and lists of the model is undone.
    """
    if model in halves.known:
        return
    found, name, has_others = halves.begin(model)
    modules = [one for one in model._flatten_layers() if hasattr(one, "module")]
    buffers = [key for one in modules for key, _ in one.module.named_buffers()]
    if not (name or has_others) or any(key.endswith("running_mean") for key in buffers):
        return
    total = _of_step if name == "train_step" else _of_losses
    try:
        with halves.trying(found, model), _undone(model) as undo:
            found.kind = _kind(
                found, model, functools.partial(total, model, train_step), data, undo
            )
    except Exception as error:  # other ranks have the same, and wait for what it is
        log.logger.debug("%s cannot be tried on parts of a batch: %r", found.subject, error)
    kinds = agree.gather_json("kind of a step", found.kind, process_set)
    found.kind = min(filter(None, kinds), default="")
    if told := found.what_mixes(model):
        missing_calls.tell(told, process_set)


def _of_losses(model: Any, _: Any, data: Any) -> list[Any]:
    return [halves.of_losses(model, data)]


def _of_step(_: Any, train_step: Callable[[Any], Any], data: Any) -> list[Any]:
    """What a step of one's own computes gradients of."""
    every: list[Any] = []

    def backward(tensors: Any, *_: Any, **__: Any) -> None:
        every.extend([tensors] if torch.is_tensor(tensors) else tensors)

    def grad(outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        backward(outputs)
        return [torch.zeros_like(one) for one in ([inputs] if torch.is_tensor(inputs) else inputs)]

    with replaced(torch.autograd, "backward", backward), replaced(torch.autograd, "grad", grad):
        train_step(data)
    return every


def _kind(found: Any, model: Any, total: Callable[[Any], Any], data: Any, undo: Any) -> str:
    tensors = [one for one in keras.tree.flatten(data) if torch.is_tensor(one) and one.dim()]
    counts = {len(one) for one in tensors}
    if len(counts) != 1 or (half := min(counts) // 2) == 0:
        return ""
    one, other = np.arange(half), np.arange(half, 2 * half)
    losses, divides = [], False
    pairs = (one, other), (other, one), (one, one), (other, other), (one, other)
    for number, parts in enumerate((*pairs, (one,), (one,))):
        rows = torch.as_tensor(np.concatenate(parts))

        def part(tensor: Any, rows: Any = rows) -> Any:
            is_of_rows = torch.is_tensor(tensor) and tensor.dim()
            return tensor[rows.to(tensor.device)] if is_of_rows else tensor

        if number <= len(pairs):  # not the last, which draws other numbers if it draws any
            undo()
        every = total(keras.tree.map_structure(part, data))
        divides |= any(map(_may_divide, every))
        losses.append(sum(float(loss.detach().double().sum()) for loss in every))
    *losses, again, alone, drawn = losses
    if losses[0] != again:  # it draws other numbers
        return ""
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    tolerance = 0.02 if any("16" in dtype for dtype in dtypes) else 1e-4
    may_be_mean = found.adds_up or divides or drawn != alone
    return halves.kind_of_losses(losses, alone, tolerance, may_be_mean)


# What passes on a loss that is divided, perhaps by this rank's number of rows.
_PASSING = ("Add", "Sub", "Neg", "ToCopy", "View", "Clone", "Squeeze", "Unsafe")


def _may_divide(loss: Any) -> bool:
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        name = type(node).__name__
        if name.startswith(("Div", "Mul")):
            return True
        if name.startswith(_PASSING):
            waiting += [following for following, _ in node.next_functions]
    return False


@contextlib.contextmanager
def _undone(model: Any) -> Iterator[Callable[[], None]]:
    """Undo at the end, and when it is asked for, what steps change."""
    every = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    tensors = [*(variable.value for variable in every), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [tensor.grad for tensor in tensors]

    def plain() -> dict[str, Any]:
        return {k: v for k, v in vars(model).items() if isinstance(v, (bool, int, float, str))}

    numbers = plain()
    lists = [(one, list(one)) for one in vars(model).values() if isinstance(one, list)]
    drawn = random.getstate(), np.random.get_state()

    def undo() -> None:
        with torch.no_grad():
            for tensor, value, gradient in zip(tensors, values, gradients, strict=True):
                tensor.copy_(value)
                tensor.grad = gradient
        for name in plain():
            del vars(model)[name]
        vars(model).update(numbers)
        for one, before in lists:
            list.__setitem__(one, slice(None), before)  # Keras's would track them again
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.manual_seed(1)

    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
        try:
            yield undo
        finally:
            undo()
