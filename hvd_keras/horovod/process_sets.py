"""Process sets as Horovod has them: their text, and their numbers."""

import itertools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvd_keras.ops import rank_ops
from hvd_keras.runtime import process_sets, rank_info


class ProcessSet(process_sets.ProcessSet):
    """``hvd_keras.ProcessSet``; its number is used again after it was removed.

    Args:
        ranks_or_comm: as in ``hvd_keras.ProcessSet``.

    Raises:
        ValueError: as ``hvd_keras.ProcessSet``, and for what is neither ranks nor a communicator.
    """

    _number: int | None = None  # that of hvd_keras, which graphs may hold
    _horovod_number: int | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        try:
            super().__init__(ranks_or_comm)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @property
    def process_set_id(self) -> int | None:
        """The lowest number that no other set had when this one was added; None if it is not."""
        return self._horovod_number

    @process_set_id.setter
    def process_set_id(self, number: int | None) -> None:
        taken = {process_set.process_set_id for process_set in process_sets.added()}
        free = next(i for i in itertools.count(1) if i not in taken)
        self._number, self._horovod_number = number, None if number is None else free

    def id(self) -> int:
        """Return the number of the set in hvd_keras.

        Raises:
            ValueError: the set was not added, or was removed.
        """
        if self._number is None or self not in process_sets.added():
            raise ValueError(f"{self} was not added, or was removed.")
        return self._number

    def size(self) -> int | None:  # type: ignore[override]
        """Return the number of ranks in the set; None if it was not added."""
        return None if self.process_set_id is None else super().size()

    def included(self) -> bool | None:  # type: ignore[override]
        """Whether this process is in the set; None if it was not added."""
        return None if self.process_set_id is None else super().included()

    def rank(self) -> int | None:  # type: ignore[override]
        """This process's rank within the set; None if the set was not added.

        Raises:
            ValueError: this process is not in the set.
        """
        return None if self.process_set_id is None else super().rank()

    def __repr__(self) -> str:
        known = self._ranks is not None or rank_info.is_initialized()
        ranks = self.ranks if known else None
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


class _AllRanks(ProcessSet):
    process_set_id = 0

    def __init__(self) -> None:
        self.mpi_comm = self._ranks = self._world_ranks = None

    def id(self) -> int:
        return 0


global_process_set: ProcessSet = _AllRanks()


def add_process_set(process_set: Any) -> process_sets.ProcessSet:
    """``hvd_keras.add_process_set``.

    Raises:
        As ``hvd_keras.add_process_set``.
    """
    return process_sets.add_process_set(as_process_set(process_set))


def as_process_set(given: Any) -> Any:
    """Return a process set, of what ``ProcessSet`` takes."""
    return given if isinstance(given, process_sets.ProcessSet) else ProcessSet(given)


def remove_process_set(process_set: ProcessSet) -> bool:
    """``hvd_keras.remove_process_set``; of the set of all ranks False, not an error.

    Args:
        process_set: one that was added.

    Returns:
        Whether there was such a set, and it was removed.

    Raises:
        ValueError: the ranks name different sets; on every rank.
    """
    if process_set.process_set_id == 0:
        return False
    return process_sets.remove_process_set(process_set)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """``hvd_keras.size_op`` of the set that has this number now.

    Raises:
        As ``hvd_keras.size_op``.
    """
    return rank_ops.size_op(_number(process_set_id), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """``hvd_keras.process_set_included_op`` of the set that has this number now.

    Raises:
        As ``hvd_keras.process_set_included_op``.
    """
    return rank_ops.process_set_included_op(_number(process_set_id), name)


def _number(process_set_id: int) -> int:
    for process_set in process_sets.added():
        if process_set.process_set_id == process_set_id:
            return process_set.id()
    return process_set_id
