"""Process sets: subsets of the ranks with their own collectives."""

import ctypes
import numbers
import operator
import os
from collections.abc import Iterable
from typing import Any

from hvd_keras.runtime import agree, libraries, rank_info


class ProcessSet:
    """A set of ranks with its own collectives.

    To use it, pass it to ``hvd.init(process_sets=...)`` or ``hvd.add_process_set`` on every rank of
    the job. Sets do not wait for each other, even if they overlap.

    Args:
        ranks_or_comm: ranks of the job, in any order; or an mpi4py communicator of them.

    Attributes:
        process_set_id: its number, the same on all ranks; None until it is added.
        mpi_comm: the communicator, if it was created from one.

    Raises:
        ValueError: ``ranks_or_comm`` is empty, or a rank occurs twice.
        TypeError: ``ranks_or_comm`` is neither ranks nor a communicator.
    """

    _ranks: list[int] | None
    _world_ranks: list[int] | None  # of a communicator; the job's ranks are known only after init()

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self._ranks = self._world_ranks = None
        if hasattr(ranks_or_comm, "Get_group"):  # mpi4py's
            self._world_ranks = world_ranks_of(ranks_or_comm)
            self.mpi_comm = ranks_or_comm
            return
        self._ranks = sorted(_integers(ranks_or_comm))
        if not self._ranks or len(set(self._ranks)) < len(self._ranks):
            raise ValueError(f"got ranks {self._ranks}, expected at least one rank, each once.")

    @property
    def ranks(self) -> list[int]:
        """The ranks of the set, as ranks of the job, in ascending order.

        Raises:
            ValueError: the set was created from a communicator, and ``hvd.init()`` was not called
                or the communicator has a process outside of the job.
        """
        if self._world_ranks is not None:
            return sorted(rank_info.from_world(rank) for rank in self._world_ranks)
        return list(range(rank_info.size())) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this process is in the set."""
        return rank_info.rank() in self.ranks

    def rank(self) -> int:
        """This process's rank within the set, from 0 to ``size() - 1``.

        Raises:
            ValueError: this process is not in the set, or the set was not added.
        """
        self.check_included("ProcessSet.rank")
        return self.ranks.index(rank_info.rank())

    def id(self) -> int:
        """Return ``process_set_id``.

        Raises:
            ValueError: the set was not added, or was removed.
        """
        if self.process_set_id is None:
            raise ValueError(
                f"{self} has not been added. Pass it to hvd.init(process_sets=[…]) or to "
                "hvd.add_process_set, on every rank."
            )
        return self.process_set_id

    def check_included(self, caller: str) -> None:
        """Raise ValueError unless the set was added and includes this process."""
        self.id()
        if not self.included():
            raise ValueError(
                f"hvd.{caller}: rank {rank_info.rank()} is not in {self}. Call it only on ranks "
                "of the set: if process_set.included(): ..."
            )

    def check_root(self, root_rank: int) -> None:
        """Raise ValueError if a root is not one of the ranks that take part."""
        if not isinstance(root_rank, numbers.Integral) or root_rank not in self.ranks:
            raise ValueError(
                f"root_rank is {root_rank!r}, expected one of the ranks that take part: "
                f"{self.text()}."
            )

    def text(self) -> str:
        """Return the ranks as text, such as "0, 2" or "0 to 3"."""
        ranks = self.ranks
        if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
            return f"{ranks[0]} to {ranks[-1]}"
        return ", ".join(map(str, ranks))

    def __reduce__(self) -> Any:
        """Make copies of a set that was added the set itself, so that copied callbacks have it."""
        if self.process_set_id is not None:
            return of_id, (self.id(),)
        return ProcessSet, (self._ranks if self.mpi_comm is None else self.mpi_comm,)

    def __repr__(self) -> str:
        if self._ranks is None and self._world_ranks is None:
            return "the process set of all ranks"
        if self._world_ranks is not None and not rank_info.is_initialized():
            return f"process set of MPI's ranks {self._world_ranks}"
        number = "" if self.process_set_id is None else f" {self.process_set_id}"
        return f"process set{number} of ranks {self.text()}"


class _AllRanks(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0
        self.mpi_comm = self._ranks = self._world_ranks = None


class ThisRank(ProcessSet):
    """This rank alone. The core does not know it, because nothing travels in it."""

    def __init__(self) -> None:
        super().__init__([rank_info.rank()])
        self.process_set_id = -1

    def __reduce__(self) -> Any:
        return ThisRank, ()


global_process_set: ProcessSet = _AllRanks()

_added: dict[int, ProcessSet] = {0: global_process_set}

# Numbers are never reused, because graphs may hold the number of a set that was removed.
_next_number = 1


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Add a process set. Every rank of the job must call it, in the set or not.

    Args:
        process_set: a ``ProcessSet``, or the argument for one: ranks, or an mpi4py communicator.
            With communicators, each rank may pass the one that it is in, as ``MPI.Comm.Split`` has
            made them: a set is added for each of them.

    Returns:
        The process set, ready for use.

    Raises:
        ValueError: (on every rank) the ranks pass different sets, a rank does not exist, or a set
            of the same ranks exists already.
        TypeError: ``process_set`` is neither a set nor ranks nor a communicator.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} has been added already.")
    # Before the ranks agree: what follows on any GPU is in an order that both sets keep.
    libraries.core().hvd_expect_process_sets(1)
    try:
        return _add(process_set)
    finally:
        libraries.core().hvd_expect_process_sets(-1)


def _add(process_set: ProcessSet) -> ProcessSet:
    global _next_number
    # The ranks may have been in other jobs before, and have used different numbers.
    is_comm = process_set.mpi_comm is not None
    views = agree.gather_json("add_process_set", [process_set.ranks, _next_number, is_comm])
    asked = [ranks for ranks, _, _ in views]
    is_split = all(is_comm for _, _, is_comm in views) and all(
        # Each member of a set asks for the same set.
        asked[member] == ranks
        for ranks in asked
        for member in ranks
    )
    if any(ranks != asked[0] for ranks in asked) and not is_split:
        raise ValueError(
            f"hvd.add_process_set: the ranks pass different process sets: {agree.by_rank(asked)}."
        )
    if process_set.ranks[-1] >= rank_info.size() or process_set.ranks[0] < 0:
        raise ValueError(
            f"hvd.add_process_set: got ranks {process_set.text()}, expected ranks from 0 to "
            f"{rank_info.size() - 1}."
        )
    for other in added():
        if other.ranks in asked:
            name = "hvd.global_process_set" if other is global_process_set else "that one"
            raise ValueError(f"hvd.add_process_set: {other} has the same ranks. Use {name}.")
    _next_number = max(number for _, number, _ in views)
    core = libraries.core()
    # Every rank adds all sets, in one order, so that their numbers are the same everywhere.
    for ranks in sorted(map(list, set(map(tuple, asked)))):
        new = process_set if ranks == process_set.ranks else type(process_set)(ranks)
        number, array = _next_number, (ctypes.c_int * len(ranks))(*ranks)
        _next_number += 1
        if core.hvd_add_process_set(number, array, len(ranks)) != 0:
            raise RuntimeError(core.hvd_error().decode())
        new.process_set_id = number
        _added[number] = new
    return process_set


def of_hosts() -> ProcessSet:
    """Return the set of this host's ranks. Adds those of all hosts: every rank must call it."""
    hosts = agree.gather_json("hosts of ranks", os.uname().nodename)
    members = [[r for r, theirs in enumerate(hosts) if theirs == host] for host in sorted({*hosts})]
    mine: ProcessSet = ThisRank()
    for ranks in members:
        known = next((other for other in added() if other.ranks == ranks), None)
        if known is None and len(ranks) > 1:
            known = add_process_set(ranks)
        if known is not None and known.included():
            mine = known
    return mine


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank of the job must call it, in the set or not.

    Args:
        process_set: the set to remove; of sets made by ``MPI.Comm.Split`` each rank's own.

    Returns:
        True if it was removed; False if it was not added.

    Raises:
        ValueError: (on every rank) it is the set of all ranks, or the ranks pass different sets.
    """
    check_type(process_set, "remove_process_set")
    if process_set is global_process_set:
        raise ValueError(
            "hvd.remove_process_set: got the set of all ranks, which cannot be removed."
        )
    number = None if process_set.process_set_id is None else process_set.id()
    asked = agree.gather_json("remove_process_set", number)
    is_split = None not in asked and all(
        asked[member] == number for number in asked for member in of_id(number).ranks
    )
    if any(number != asked[0] for number in asked) and not is_split:
        raise ValueError(
            "hvd.remove_process_set: the ranks pass different process sets: "
            f"{agree.by_rank(list(map(str, asked)))}."
        )
    if process_set.process_set_id is None:
        return False
    for number in set(asked):
        libraries.core().hvd_remove_process_set(number)
        _added.pop(number).process_set_id = None
    return True


def of_id(process_set_id: int) -> ProcessSet:
    """Return the process set with this number."""
    return _added[process_set_id]


def added() -> list[ProcessSet]:
    """All sets that were added; the set of all ranks comes first."""
    return list(_added.values())


def forget_all() -> None:
    """Forgets all sets but the global one, as the core does in ``shutdown``."""
    for number in [number for number in _added if number != 0]:
        _added.pop(number).process_set_id = None


def world_ranks_of(comm: Any) -> list[int]:
    """The ranks in ``MPI.COMM_WORLD`` of an mpi4py communicator's processes, in its order."""
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise ValueError("got MPI.COMM_NULL, expected a communicator that this process is in.")
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return list(MPI.Group.Translate_ranks(group, range(group.Get_size()), world))


def _integers(ranks: Any) -> list[int]:
    try:
        return [operator.index(rank) for rank in ranks]
    except TypeError as error:
        raise TypeError(
            f"got {ranks!r}, expected ranks, such as [0, 2], or an mpi4py communicator."
        ) from error


def check_type(process_set: Any, caller: str) -> None:
    """Raise TypeError unless it is a process set."""
    if not hasattr(process_set, "check_included"):
        raise TypeError(
            f"hvd.{caller}: process_set is {process_set!r}, expected an hvd.ProcessSet, such as "
            "hvd.add_process_set([0, 1]) returns."
        )


def check(process_set: Any, caller: str) -> None:
    """Raise TypeError or ValueError unless it is a process set that includes this process."""
    check_type(process_set, caller)
    process_set.check_included(caller)
