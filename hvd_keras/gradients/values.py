"""Compares the rows and the values of the variables that the ranks have while they train."""

import collections
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_keras.gradients import specs
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import flatten, has_gpu, values_of
from hvd_keras.runtime.process_sets import ProcessSet

# A check of a part of the values reads at most _BYTES and _MOST_PIECES variables, takes _SHARE of
# the time, and follows at least _STEPS steps after the one before.
_BYTES = 1 << 18
_MOST_PIECES = 64
_SHARE = 0.004
_STEPS = 50

_ROWS = 64  # of which the rows of all ranks are compared


def is_array(data: Any) -> bool:
    """Whether it is an array, a tensor, or a frame of pandas."""
    return hasattr(data, "dtype") or hasattr(data, "to_numpy")


def row_hashes(data: Any) -> list[int] | None:
    """Describe rows by their number and a hash of the first ones; None if they say nothing."""
    digest, differ, rows = 0, False, 0
    for part in flatten(data):
        if part is None:
            continue
        if not is_array(part) or len(part.shape) == 0:
            return None
        rows = int(part.shape[0])
        head = np.asarray(part[:_ROWS])  # rows that are all equal, such as padding, say nothing
        digest = agree.digest(head, digest)
        differ |= bool((head != head[:1]).any())
    return [rows, digest] if differ else None


class Values:
    """The values of variables that must be equal on all ranks while they train.

    ``callbacks`` are the names of the callbacks of each rank; ``loop`` names a custom loop.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        process_set: ProcessSet,
        callbacks: Sequence[Sequence[str]] = ((),),
        loop: str = "fit",
    ) -> None:
        self.variables = variables
        self.loop = loop
        self.process_set = process_set
        shared = set.intersection(*map(set, callbacks))
        self.is_broadcast = "BroadcastGlobalVariablesCallback" in shared
        names = [", ".join(sorted({*theirs} - shared)) or None for theirs in callbacks]
        #: Which ranks have callbacks that not all have, as text; often these assigned the values.
        self.alone = agree.by_rank(names, process_set) if any(names) else ""
        self._scalars = [v for v in variables if not tuple(v.shape)]
        # The others, in pieces: variable and rows; None: all rows.
        self._pieces: list[tuple[Any, slice | None]] = []
        for variable in variables:
            if tuple(variable.shape):
                size = specs.spec_of(variable).bytes
                rows = variable.shape[0] or 1  # None: any number
                step = max(1, rows * _BYTES // max(1, size))  # rows of about _BYTES
                parts = [slice(row, row + step) for row in range(0, rows, step)]
                self._pieces += [(variable, part if len(parts) > 1 else None) for part in parts]
        self.reported = False
        self._cost = 0.0
        self.restarts = 0
        self._begin()

    def restart(self) -> None:
        """Count steps from 0 again: ``hvd.join`` ends different numbers of them."""
        self.restarts += 1
        self._begin()
        self.next = 1  # the ranks that joined first lack the others' last updates

    def _begin(self) -> None:
        self._place = self._round = 0  # the next piece, and the step of the first one
        self.steps = 0
        self.equal_after = 0  # steps: all values were equal then
        self.next = _STEPS  # the step that compares
        self._since: tuple[int, float] | None = None

    def different(self, name: str, bit_by_bit: bool = False) -> tuple[str, str] | None:
        """Compare all values; return None if they are equal, or now are, unless ``bit_by_bit``.

        Otherwise the first variable that differs, and how many; and the ranks, with their hosts,
        that differ from most others, which are equal; no ranks without such a majority.
        """
        # A number for each variable; they travel only if a hash of all differs.
        mine = [agree.digest(values_of(variable)) for variable in self.variables]
        by_rank = agree.gather_if_different(name, mine, self.process_set)
        if by_rank is None:
            return None
        if len({len(values) for values in by_rank}) > 1:
            return "the number of its variables", ""
        differing = [
            variable
            for variable, values in zip(self.variables, zip(*by_rank, strict=True), strict=True)
            if len(set(values)) > 1
        ]
        gpus = agree.gather_json(f"{name}.gpus", has_gpu(), self.process_set)
        if any(gpus) and not bit_by_bit:
            differing = [v for v in differing if not self._put_together(v, name)]
            if not differing:
                return None
        path = getattr(differing[0], "path", differing[0].name)
        more = len(differing) - 1
        hosts = agree.gather_json(f"{name}.hosts", os.uname().nodename, self.process_set)
        ((common, count),) = collections.Counter(map(tuple, by_rank)).most_common(1)
        odd = [
            f"rank {rank} on {host}"
            for rank, host, theirs in zip(self.process_set.ranks, hosts, by_rank, strict=True)
            if tuple(theirs) != common and 2 * count > len(by_rank)
        ]
        return f"{path}" + (f", and {more} more" if more else ""), ", ".join(odd)

    def _put_together(self, variable: Any, name: str) -> bool:
        """Give all ranks the first one's values, if theirs differ by what a GPU may round.

        Its kernels add duplicate rows of an embedding in any order, and XLA chooses on each rank
        the kernel that is the fastest there, among some that round differently.
        """
        mine = values_of(variable)
        call = {"process_set": self.process_set.id(), "name": f"{name}.{variable.name}"}
        if not agree.is_rounding(mine, call):
            return False
        (first,) = agree.run("broadcast", [mine], root=self.process_set.ranks[0], **call)
        variable.assign(first)
        return True

    def different_after_step(self) -> tuple[str, str] | None:
        """Compare a part of the values from time to time, called after each step."""
        # All ranks know what the slowest has measured, so they choose the same next step.
        self.steps += 1
        if self._since is None:
            self._since = self.steps, time.perf_counter()  # the first step was compiled
        if self.steps < self.next:
            return None
        begin = time.perf_counter()
        steps, since = self._since
        # Unknown in the first step, which counts as infinite.
        per_step = (begin - since) / (self.steps - steps) if self.steps > steps else math.inf
        part = self._part()
        # One row of 24 bytes: a checksum, what a comparison costs, the time of a step.
        mine = np.array([[part, max(self._cost, time.perf_counter() - begin), per_step]])
        name = f"{self.loop} a part of the values"
        call = {"name": name, "process_set": self.process_set.id()}
        (gathered,) = agree.run("allgather", [mine], **call)
        # So seldom that the dearest comparison takes _SHARE of the time of the shortest steps.
        interval = gathered[:, 1].max() / (_SHARE * max(1e-6, gathered[:, 2].min()))
        self.next = self.steps + max(_STEPS, math.ceil(interval))
        name = f"{self.loop} values"
        # A rank that has joined (hvd.join) has other values until all have.
        is_whole = len(gathered) == self.process_set.size()
        parts = len(set(gathered[:, 0]))
        different = self.different(name) if is_whole and parts > 1 else None
        self._cost = time.perf_counter() - begin
        self._since = self.steps, time.perf_counter()
        if different is None and self._place == len(self._pieces):
            self.equal_after, self._place = self._round, 0
        return different

    def _part(self) -> int:
        # The scalars (rates, counters) each time, the large ones piece by piece in rounds.
        digest = done = 0
        if self._place == 0:
            self._round = self.steps
        for variable in self._scalars:
            digest = agree.digest(values_of(variable), digest)
        for variable, part in self._pieces[self._place : self._place + _MOST_PIECES]:
            piece = values_of(variable, part)
            digest = agree.digest(piece, digest)
            done += piece.nbytes
            self._place += 1
            if done >= _BYTES:
                break
        return digest & (2**53 - 1)  # travels as a float64
