"""Describes the rows of a dataset by some of them, although reading may draw random numbers."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_keras.data import reading
from hvd_keras.gradients import values
from hvd_keras.runtime import log
from hvd_keras.saving import per_rank

SEEDS = (0, 1)


def described(rows: int, read: Callable[[], Sequence[list[Any]]]) -> list[int] | None:
    """Return what is equal if rows are, in whatever order; None if they say nothing.

    Args:
        rows: their number.
        read: returns the parts of a batch of some rows, read by the first of SEEDS, and again by
            the other; may seed the global random generators.
    """
    try:
        one, other = undisturbed(read)
        hashes = values.row_hashes(one)
        pairs = [tuple(map(values.row_hashes, pair)) for pair in zip(one, other, strict=True)]
    except Exception as error:  # training raises it, too
        log.logger.debug("rows cannot be compared: %r", error)
        return None
    # Rows that are random as a whole, without even labels that stay, are others on each rank.
    stays = any(first and first == again for first, again in pairs)
    return [rows, *hashes] if hashes and stays else None


def undisturbed(read: Callable[[], Any]) -> Any:
    """Return what a function returns that may seed the global random generators; put them back."""
    drawn = per_rank.random_state()
    try:
        return read()
    finally:
        per_rank.set_random_state(drawn)


def batch_by_seed(
    seed_others: Callable[[int], Any], dataset: Any, collate: Callable[[Any], Any], seed: int
) -> Any:
    """Return a batch of some rows; called where a DataLoader's workers run."""
    for seeds in (random.seed, np.random.seed, seed_others):
        seeds(seed)
    length = len(dataset)
    numbers = np.linspace(0, length - 1, min(length, 9)).astype(int)
    return reading.fetched(dataset, collate, numbers)


def init_of(
    init: Callable[[int], Any] | None, dataset: Any, info: Callable[[], Any]
) -> Callable[[int], None]:
    """Return a worker_init_fn by which a script's, and its dataset, find that dataset in a worker.

    ``info`` is ``get_worker_info``, which has what reads batches.
    """
    return functools.partial(_init, init, dataset, info)


def _init(init: Any, dataset: Any, info: Callable[[], Any], worker: int) -> None:
    object.__setattr__(info(), "dataset", dataset)
    if init is not None:
        init(worker)
