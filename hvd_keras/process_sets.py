"""Some of the ranks, which call collectives among themselves."""

import ctypes
import itertools
from collections.abc import Iterable
from typing import Any

from hvd_keras import _library, runtime


class ProcessSet:
    """A set of ranks with collectives of its own.

    Takes effect when it is given to ``hvd.init(process_sets=…)`` or ``hvd.add_process_set``, on
    every rank of the job. Each set makes progress independently of the others, also where they
    overlap.

    Args:
        ranks_or_comm: the ranks, of the job, in any order; or an mpi4py communicator of them.

    Attributes:
        process_set_id: its number, the same on all ranks; None until it takes effect.

    Raises:
        ValueError: a rank is named twice, or none is.
        TypeError: it is neither ranks nor a communicator.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self._ranks: list[int] | None = sorted(_ranks_of(ranks_or_comm))
        if not self._ranks or len(set(self._ranks)) < len(self._ranks):
            raise ValueError(f"got the ranks {self._ranks}, expected at least one, and each once.")

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are in there, in ascending order."""
        return list(range(runtime.size())) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """How many ranks are in there."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this process is in there."""
        return runtime.rank() in self.ranks

    def rank(self) -> int:
        """This process's number among those in there, from 0.

        Raises:
            ValueError: it is not in there.
        """
        self.check_included("ProcessSet.rank")
        return self.ranks.index(runtime.rank())

    def id(self) -> int:
        """``process_set_id``.

        Raises:
            ValueError: it has not taken effect, or no longer has.
        """
        if self.process_set_id is None:
            raise ValueError(
                f"{self} has not been added. Give it to hvd.init(process_sets=[…]) or to "
                "hvd.add_process_set, on every rank."
            )
        return self.process_set_id

    def check_included(self, caller: str) -> None:
        """Raises ValueError unless the set has taken effect and this process is in there."""
        self.id()
        if not self.included():
            raise ValueError(
                f"hvd.{caller}: rank {runtime.rank()} is not in {self}. Call it only on those "
                "ranks: if process_set.included(): ..."
            )

    def text(self) -> str:
        """The ranks in words."""
        ranks = self.ranks
        if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
            return f"{ranks[0]} to {ranks[-1]}"
        return ", ".join(map(str, ranks))

    def __repr__(self) -> str:
        if self._ranks is None:
            return "the process set of all ranks"
        number = "" if self.process_set_id is None else f" {self.process_set_id}"
        return f"process set{number} of ranks {self.text()}"


class _AllRanks(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0
        self._ranks = None


global_process_set: ProcessSet = _AllRanks()

_added: dict[int, ProcessSet] = {0: global_process_set}


def of_id(process_set_id: int) -> ProcessSet:
    """The process set with this number."""
    return _added[process_set_id]


# Never used again, for graphs may hold the number of a set that is gone. The ranks add the same
# sets in the same order, so the numbers agree.
_numbers = itertools.count(1)


def begin(process_set: ProcessSet) -> None:
    """Makes it take effect. The ranks have agreed on it, and all call this."""
    ranks = process_set.ranks
    process_set_id = next(_numbers)
    array = (ctypes.c_int * len(ranks))(*ranks)
    core = _library.core()
    if core.hvd_add_process_set(process_set_id, array, len(ranks)) != 0:
        raise RuntimeError(core.hvd_error().decode())
    process_set.process_set_id = process_set_id
    _added[process_set_id] = process_set


def end(process_set: ProcessSet) -> None:
    """Undoes ``begin``, on all ranks."""
    number = process_set.id()
    _library.core().hvd_remove_process_set(number)
    del _added[number]
    process_set.process_set_id = None


def forget_all() -> None:
    """After ``shutdown``: the core has none any more."""
    for number in [number for number in _added if number != 0]:
        _added.pop(number).process_set_id = None


def added() -> list[ProcessSet]:
    """All that have taken effect, that of all ranks first."""
    return list(_added.values())


def _ranks_of(ranks_or_comm: Any) -> list[int]:
    if hasattr(ranks_or_comm, "Get_group"):  # mpi4py's
        from mpi4py import MPI

        group = ranks_or_comm.Get_group()
        world = MPI.COMM_WORLD.Get_group()
        return list(MPI.Group.Translate_ranks(group, range(group.Get_size()), world))
    try:
        return [int(rank) for rank in ranks_or_comm]
    except TypeError as error:
        raise TypeError(
            f"got {ranks_or_comm!r}, expected ranks, such as [0, 2], or an mpi4py communicator."
        ) from error
