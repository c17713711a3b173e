"""Compares and broadcasts the variables of a training."""

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_keras.backends.torch.collectives import grouped_broadcast
from hvd_keras.gradients import buckets
from hvd_keras.hooks.variables import give_each_rank_its_own_randomness
from hvd_keras.runtime import agree, settings
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


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
    seeds = [v for v in variables if v.path.endswith("seed_generator_state")]
    give_each_rank_its_own_randomness(seeds, process_set)


def _in_buckets(variables: Sequence[Any]) -> list[list[Any]]:
    sizes = [variable.value.nbytes for variable in variables]
    filled = buckets.fill(sizes, settings.read().bucket_bytes)
    return [[variables[i] for i in bucket] for bucket in filled]


def digest(model: Any) -> int:
    """Return a hash of what must be equal on all ranks after each update: the trained weights."""
    crc = 0
    for variable in model.trainable_variables:
        crc = zlib.crc32(np.ascontiguousarray(as_bytes(variable.value)).data, crc)
    return crc


def as_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor in the host's memory, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
