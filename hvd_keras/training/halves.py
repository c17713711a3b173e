"""Finds out by the rows of a batch whether its loss follows from the losses of its parts."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_keras.runtime import agree

_TOLERANCE = 1e-4  # relative to the largest value


def mix(
    name: str, loss_of: Callable[[slice], Any], rows: int, is_sum: bool, process_set: agree.Ranks
) -> bool:
    """Whether on a rank the loss of its rows does not follow from those of the halves.

    Args:
        name: of the loss.
        loss_of: returns a value for each row of a slice, or one number, their mean or sum.
        rows: this rank's number of rows.
        is_sum: whether one number is a sum.
        process_set: the ranks that compute the loss together.
    """
    mixes, half = False, rows // 2
    with contextlib.suppress(Exception):  # it may need whole batches
        one, other, both = map(loss_of, (slice(half), slice(half, 2 * half), slice(2 * half)))
        joined = np.concatenate([one, other]) if both.ndim else one + other
        if not both.ndim and not is_sum:
            joined = joined / 2
        largest = max(np.abs(part).max(initial=0) for part in (one, other, both))
        mixes = bool(np.abs(joined - both).max(initial=0) > _TOLERANCE * largest)
    call = {"name": f"rows of loss {name}", "process_set": process_set.id()}
    (found,) = agree.run("allreduce", [np.array([mixes])], reduction="Max", **call)
    return bool(found[0])
