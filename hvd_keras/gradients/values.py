"""Compares the rows and the values of the variables that the ranks have while they train."""

import collections
import functools
import itertools
import math
import os
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvd_keras.gradients import missing_calls, model_ranks
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import flatten, has_gpu, values_of
from hvd_keras.runtime.process_sets import ProcessSet

# Comparisons in steps take _SHARE of the time, and follow at least _STEPS steps after another.
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
        digests = [functools.reduce(_digest_after, row, 0) for row in _first_rows(part)]
        digest = agree.digest(np.array(digests, np.int64), digest)
        differ |= len(set(digests)) > 1  # equal rows, such as padding, say nothing
    return [rows, digest] if differ else None


def _digest_after(before: int, values: Any) -> int:
    return agree.digest(np.asarray(values), before)


def _first_rows(part: Any) -> list[list[Any]]:
    """The first rows of an array, each as the arrays that it consists of."""
    if hasattr(part, "tocsr"):  # SciPy's
        head = part.tocsr()[:_ROWS]
        ends = itertools.pairwise(head.indptr)
        return [[head.indices[begin:end], head.data[begin:end]] for begin, end in ends]
    rows = range(min(_ROWS, int(part.shape[0])))
    if hasattr(part, "dense_shape"):  # a tf.SparseTensor
        places, numbers = np.asarray(part.indices), np.asarray(part.values)
        is_first = places[:, 0] < _ROWS
        places, numbers = places[is_first], numbers[is_first]
        return [[places[of, 1:], numbers[of]] for of in (places[:, 0] == row for row in rows)]
    if hasattr(part, "row_splits"):  # a tf.RaggedTensor
        ragged = [part[row] for row in rows]
        return [
            [getattr(r, "flat_values", r), *getattr(r, "nested_row_splits", ())] for r in ragged
        ]
    return [[row] for row in np.asarray(part[:_ROWS])]


def check_rows(gathered: Sequence[Any], process_set: ProcessSet) -> None:
    """Tell if each rank trains on another's rows, by what ``row_hashes`` returned on each."""
    # Equal hashes of the first rows; a rank without rows to compare has None.
    groups: dict[Any, list[str]] = {}
    for rank, rows in zip(process_set.ranks, map(tuple, filter(None, gathered)), strict=False):
        groups.setdefault(rows, []).append(str(rank))
    if None in gathered or model_ranks.alone.get() or min(map(len, groups.values())) == 1:
        return
    who = f"all {process_set.size()}"
    if len(groups) > 1:
        who = f"{', '.join(map(' and '.join, groups.values()))} of the"
    missing_calls.tell(
        f"{who} ranks train on the same rows, so {process_set.size()} ranks do the work of "
        f"{len(groups)}. Give each rank its share: x = hvd.data.shard((x, y), batch_size=32), or "
        "x = hvd.data.shard(dataset), and model.fit(x, ...). If a rank trains alone "
        "on purpose, write: with hvd.local_fit(): ...",
        process_set,
        parts=True,
    )


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
        """Compare all values from time to time, called after each step."""
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
        values = map(values_of, self.variables)
        checksum = functools.reduce(_digest_after, values, 0) & (2**53 - 1)  # exact as a float64
        # One row of 24 bytes: a checksum, what a comparison costs, the time of a step.
        mine = np.array([[checksum, max(self._cost, time.perf_counter() - begin), per_step]])
        call = {"name": f"{self.loop} checksum", "process_set": self.process_set.id()}
        (gathered,) = agree.run("allgather", [mine], **call)
        # So seldom that the dearest comparison takes _SHARE of the time of the shortest steps.
        interval = gathered[:, 1].max() / (_SHARE * max(1e-6, gathered[:, 2].min()))
        self.next = self.steps + max(_STEPS, math.ceil(interval))
        # A rank that has joined (hvd.join) has other values until all have.
        is_whole = len(gathered) == self.process_set.size()
        are_equal = len(set(gathered[:, 0])) == 1
        different = self.different(f"{self.loop} values") if is_whole and not are_equal else None
        self._cost = time.perf_counter() - begin
        self._since = self.steps, time.perf_counter()
        if is_whole and different is None:
            self.equal_after = self.steps
        return different

    def check(self, when: Literal["begun", "step", "ended"]) -> None:
        """Compare the ranks' values now, and tell how they differ."""
        # In steps one request now and then; at the beginning and the end all ranks are here anyway.
        reported = self.reported
        if when != "step":
            different = self.different(f"fit has {when}")  # all ranks wait for each other here
        elif reported:
            return
        else:
            different = self.different_after_step()
        if when == "begun":
            # Scripts whose first steps are local synchronize later: the first step compares
            # then, and tells later. Otherwise it compares nothing again.
            if different is not None and missing_calls.first_steps_are_local:
                self.reported = True
                return
            missing_calls.synchronized.add(*self.variables)
        self.reported = reported or different is not None  # as on all ranks
        if reported or different is None or model_ranks.alone.get():
            return
        if any(
            variable in missing_calls.told_alone
            or (
                variable in missing_calls.begun_apart and variable not in missing_calls.synchronized
            )
            for variable in self.variables
        ):
            return
        size, (what, odd) = self.process_set.size(), different
        if when == "begun" and not self.is_broadcast:
            text = (
                f"the {size} ranks began to train with different weights ({what}), so each of "
                f"them trains a different model. {missing_calls.ADD_THE_CALLBACK}"
            )
        elif self.restarts and self.steps == 1:
            text = (
                f"the {size} ranks' values of {what} differ after hvd.join: a rank that has joined "
                "misses the updates of the others. Give all ranks those of the last one: "
                "last = int(hvd.join()), then hvd.broadcast_variables(model.variables, "
                "root_rank=last), and the same for optimizer.variables."
            )
        else:
            how = f"differ after {self.steps} steps of {self.loop}"
            if self.equal_after or not self.restarts:
                how += f", although they were equal after {self.equal_after}"
            if when == "begun":
                how = "differ before the first step, although there is a broadcast callback"
            who, same = "A callback, a train_step", "pass the same callbacks, "
            if self.alone:
                who = f"Not all ranks have the same callbacks ({self.alone}), or a callback"
            if self.loop != "fit":
                who, same = "The script, an optimizer with its own learning rate", ""
            text = (
                f"the {size} ranks' values of {what} {how}: the ranks train different models. "
                f"{who} or a layer assigns values that depend on this rank's data, logs or random "
                f"numbers. Assign the same on all ranks: {same}average with hvd.allreduce what the "
                "values are computed from, or let one rank choose them with hvd.broadcast. To add "
                "up gradients, use gradient_accumulation_steps of the optimizer."
            )
            if odd:
                text += (
                    f" Most ranks are equal, but not {odd}: if no code assigns values there alone, "
                    "memory or a processor there is faulty."
                )
        missing_calls.tell(text, self.process_set, parts=True)
