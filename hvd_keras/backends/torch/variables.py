"""Compares, broadcasts and averages the variables of a training."""

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from hvd_keras.backends.torch.collectives import grouped_allreduce, grouped_broadcast
from hvd_keras.gradients import buckets
from hvd_keras.runtime import agree, settings
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import Average, Max, Min


def describe(variables: Iterable[Any]) -> dict[str, str]:
    """Return what must be equal on all ranks about variables, by number."""
    # Keras counts the layers of a name per process, so the suffixes may differ between ranks.
    return {
        f"variable {i}": f"{re.sub(r'(_[0-9]+)?(?=/|$)', '', v.path)} {v.dtype}{list(v.shape)}"
        for i, v in enumerate(variables)
    }


def describe_optimizer(optimizer: Any) -> dict[str, str]:
    """Return an optimizer's class and options; a plain learning rate is broadcast."""
    config = optimizer.get_config()
    if not isinstance(config.get("learning_rate"), dict):
        config.pop("learning_rate", None)
    config.pop("name", None)
    return {"optimizer": type(optimizer).__name__, **{k: repr(v) for k, v in config.items()}}


def check_equal(name: str, mine: dict[str, str], process_set: ProcessSet) -> None:
    """Raise ValueError on every rank if the ranks' descriptions differ."""
    views = agree.gather_if_different(name, mine, process_set)
    if views is None:
        return
    keys = [key for key in {k: None for view in views for k in view} if _differs(key, views)]
    lines = [f"{key}: {agree.by_rank([v.get(key, 'none') for v in views])}" for key in keys[:5]]
    shown = "\n  ".join([*lines, f"and {len(keys) - 5} more"] if len(keys) > 5 else lines)
    raise ValueError(
        f"The ranks train different models:\n  {shown}\nGive all ranks the same layers, in the "
        "same order, and the same optimizer. Only the learning rate is broadcast."
    )


def _differs(key: str, views: Sequence[dict[str, str]]) -> bool:
    return len({view.get(key) for view in views}) > 1


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Assign the root rank's values to the variables of every rank.

    The states of random generators get the root's seed mixed with the rank.

    Args:
        variables: Keras variables, in the same order on all ranks.
        root_rank: the rank of the job whose values all ranks get.
        process_set: the ranks that take part.

    Raises:
        ValueError: (on every rank) the ranks' variables differ, or ``root_rank`` is none of theirs.
    """
    process_set.check_included("broadcast_variables")
    variables = list(variables)
    check_equal("broadcast.variables", describe(variables), process_set)
    for number, bucket in enumerate(_in_buckets(variables)):
        values = [variable.value.detach() for variable in bucket]
        name = f"variables {number}"
        for variable, value in zip(
            bucket, grouped_broadcast(values, root_rank, name, process_set), strict=True
        ):
            variable.assign(value)
    if process_set.rank():
        for variable in variables:
            if variable.path.endswith("seed_generator_state"):
                mix_in_rank(variable, process_set)


def mix_in_rank(state: Any, process_set: ProcessSet) -> None:
    """Make equal states of random generators differ by rank, in the same way in each run."""
    if process_set.rank():  # the first rank's stays
        seed, *rest = state.numpy().tolist()
        mixed = np.random.default_rng((seed, process_set.rank())).integers(2**31 - 1)
        state.assign(np.array([mixed, *rest]))


def _in_buckets(variables: Sequence[Any]) -> list[list[Any]]:
    sizes = [variable.value.nbytes for variable in variables]
    filled = buckets.fill(sizes, settings.read().bucket_bytes)
    return [[variables[i] for i in bucket] for bucket in filled]


def average_variables(variables: Sequence[Any], process_set: ProcessSet) -> None:
    """Assign to variables their mean over the ranks; equal ones keep every bit."""
    if process_set.size() == 1 or not variables:
        return
    values = [variable.value.detach() for variable in variables]
    # A mean of equal values may be rounded to another one; clipped to them it is not.
    low, mean, high = (
        grouped_allreduce(values, op=op, name=f"variables' {op.value}s", process_set=process_set)
        for op in (Min, Average, Max)
    )
    for variable, *parts in zip(variables, mean, low, high, strict=True):
        variable.assign(torch.clip(*parts))


def of_training(model: Any) -> list[Any]:
    """Return the variables of a model and its optimizers, in the same order on all ranks."""
    found = [*model.variables]
    for value in vars(model).values():
        if isinstance(value, keras.optimizers.Optimizer):
            found += value.variables
    found += model.optimizer.variables if model.optimizer is not None else []
    return list({id(variable): variable for variable in found}.values())


def moving_statistics(model: Any) -> list[Any]:
    """Return the moving statistics of batch normalisation, which cover this rank's batches."""
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization)]
    return [
        v for layer in layers if layer.built for v in (layer.moving_mean, layer.moving_variance)
    ]


def digest(model: Any) -> int:
    """Return a hash of what must be equal on all ranks after each update: the trained weights."""
    crc = 0
    for variable in model.trainable_variables:
        crc = zlib.crc32(np.ascontiguousarray(as_bytes(variable.value)).data, crc)
    return crc


def as_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor in the host's memory, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
