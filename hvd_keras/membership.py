"""Process sets that come and go, the same on all ranks."""

from collections.abc import Iterable
from typing import Any

from hvd_keras import agree, process_sets, runtime
from hvd_keras.process_sets import ProcessSet


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Makes a process set take effect. Every rank of the job calls it, in it or not.

    Args:
        process_set: a ``ProcessSet``, or what makes one: ranks, or an mpi4py communicator.

    Returns:
        The process set, ready for use.

    Raises:
        ValueError: the ranks name different sets, a rank does not exist, or there is such a set
            already; on every rank.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} has been added already.")
    asked = agree.gather_json("add_process_set", process_set.ranks)
    if any(ranks != asked[0] for ranks in asked):
        raise ValueError(
            "hvd.add_process_set: the ranks ask for different process sets:"
            + "".join(f"\n  rank {r}: {ranks}" for r, ranks in enumerate(asked))
        )
    if process_set.ranks[-1] >= runtime.size() or process_set.ranks[0] < 0:
        raise ValueError(
            f"hvd.add_process_set: got ranks {process_set.text()}, expected ranks from 0 to "
            f"{runtime.size() - 1}."
        )
    for other in process_sets.added():
        if other.ranks == process_set.ranks:
            raise ValueError(f"hvd.add_process_set: {other} has the same ranks. Use that one.")
    process_sets.begin(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set. Every rank of the job calls it, in it or not.

    Args:
        process_set: one that has been added.

    Returns:
        Whether it was there to be removed.

    Raises:
        ValueError: it is that of all ranks, or the ranks name different ones; on every rank.
    """
    if process_set is process_sets.global_process_set:
        raise ValueError("hvd.remove_process_set: got the set of all ranks, which cannot go.")
    asked = agree.gather_json("remove_process_set", process_set.process_set_id)
    if any(number != asked[0] for number in asked):
        raise ValueError(
            "hvd.remove_process_set: the ranks name different process sets:"
            + "".join(f"\n  rank {r}: {number}" for r, number in enumerate(asked))
        )
    if process_set.process_set_id is None:
        return False
    process_sets.end(process_set)
    return True
