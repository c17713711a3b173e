"""The passes over sources of ``hvd.data.shard``, and what the ranks compare of them."""

import contextlib
import numbers
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_keras.data import reading
from hvd_keras.data.reading import Source
from hvd_keras.data.split import MODES, Split
from hvd_keras.runtime import agree, log, process_sets
from hvd_keras.runtime.keras import PyDataset, keras
from hvd_keras.runtime.process_sets import ProcessSet


@dataclass
class Passes:
    """Numbers the passes over a sharded source; the number decides the order."""

    next: int
    # The source, if it shuffles itself: then its order depends on how often it was begun.
    shuffling: Any
    source: Source
    start: int = 0  # the row at which the pass in progress began
    unread: int = 0  # steps before that row
    resume: tuple[int, int] = (0, 0)  # both, of the pass that begins next
    epoch: int = 0  # the number of the pass with which an epoch of fit began
    # Of repeated data, of which a prefetch may have begun more passes than fit has read: the pass
    # with which the last fit began, and the steps that it has read since.
    first: int | None = None
    read: int = 0
    goes_on: bool = False  # an epoch of fit begins where the last one ended
    repeats: bool = False  # the data were ever repeated

    def __post_init__(self) -> None:
        # Passes that neither this process has begun nor those that it continues.
        self._not_begun = self.next

    @property
    def begun(self) -> int:
        """The number of passes that this process has begun, and those that it continues."""
        return self.next - self._not_begun

    def share_of_last_step(self) -> float:
        """How many of the rows of this pass's last step are no padding for training."""
        split, step = self.source.split, self.source.global_batch
        rest = (self.source.length - self.start) % step
        return rest / step if rest and split.uneven == "pad" and not split.evaluation else 1.0

    def begin_fit(self, repeated: bool = True) -> None:
        """Let a fit begin with the pass after those that were read of repeated data."""
        # A shuffle of the source's own cannot go back.
        if self.first is not None and self.shuffling is None:
            self.next = self.first - self.read // -self.source.steps  # rounded up
        self.first, self.read = self.next if repeated else None, 0

    def catch_up(self, next: int, begun: int) -> None:
        """Go on behind so many passes, without reading them."""
        if self.shuffling is not None:
            # A shuffle advances its order when a pass begins, so nothing need be read.
            for _ in range(begun - self.begun):
                iter(self.shuffling)
        self.next, self._not_begun = next, next - begun

    def begin(self) -> Any:
        """Return the number of a pass that begins, and the row at which it does: int64 [2]."""
        self.next += 1
        self.start, self.unread = self.resume
        self.resume = (0, 0)
        return np.array([self.next - 1, self.start])

    def state(self, step: int) -> list[int]:
        """What ``restore`` needs to go on at ``step`` of the epoch; 0: at the next one.

        The numbers are those of the pass and of those begun, the rows that all ranks have seen of
        its pass, all rows, and ``first`` and ``read``.
        """
        number, seen = self.next, 0
        if self.goes_on:
            assert self.first is not None
            number = self.first + self.read // self.source.steps
            seen = self.read % self.source.steps * self.source.global_batch
        elif step:
            number = self.epoch
            seen = self.start + (step - self.unread) * self.source.global_batch
        begun = number - self._not_begun
        return [number, begun, seen, self.source.length, self.first or 0, self.read]

    def seek(self, row: int) -> int:
        """Let the pass that begins next do so at ``row``; return the steps that it then lacks."""
        source, split = self.source, self.source.split
        if again := row % source.unit:
            row -= again
            log.logger.warning(
                "hvd.data.shard uses %s rows again, because the interrupted epoch's batches had "
                "another size than now.",
                again,
            )
        steps = split.steps_from(row)
        left_out = source.length - row - steps * source.global_batch
        if split.uneven == "share" and left_out >= split.size and not split.rank:
            log.logger.warning(
                "hvd.data.shard leaves out the last %s rows of the interrupted epoch, because all "
                "batches have the same size. uneven='pad' includes them.",
                left_out,
            )
        self.resume = (row, source.steps - steps)
        if not steps:  # nothing of it is read, and so it never begins
            self.begin()
        return source.steps - steps

    def restore(self, state: list[int]) -> None:
        """Continue where another process was."""
        number, begun, seen, rows, first, read = state
        if self.goes_on:
            first, read = number, seen // self.source.global_batch
        if self.first is not None:
            self.first, self.read = first, read
        self.epoch = number
        if seen and rows != self.source.length:
            raise ValueError(
                f"the data had {rows} rows when a checkpoint was written within an epoch, and now "
                f"have {self.source.length}, so the rest of the epoch is unknown. Give the same "
                "data, or begin anew with restore=False."
            )
        self.catch_up(number, begun)


def check_arguments(split: Split, start_epoch: int) -> None:
    """Raise ValueError if arguments of ``shard`` are impossible."""
    batch_size, shuffle, seed, uneven = split.batch_size, split.shuffle, split.seed, split.uneven
    given = shuffle or 0, seed, start_epoch
    if not all(isinstance(number, numbers.Integral) for number in given) or min(given) < 0:
        raise ValueError(f"{shuffle=}, {seed=}, {start_epoch=}, expected integers of 0 or more.")
    if uneven not in MODES:
        raise ValueError(f"{uneven=}, expected one of {', '.join(map(repr, MODES))}.")
    if batch_size is None:
        return
    if not isinstance(batch_size, numbers.Integral) or batch_size < 1:
        raise ValueError(f"{batch_size=}, expected an integer: rows per rank and step, 1 or more.")


_TENSOR_SPEC = re.compile(r"TensorSpec\(shape=(\(.*?\)), dtype=tf.(\w+), name=None\)")
_SAME_SOURCE = (
    "Give every rank the same whole source: it gets its share of that. If each rank has rows or "
    "files of its own, use hvd.data.agree_on_steps instead."
)
_SAME_ORDER = (
    f"{_SAME_SOURCE} Random numbers need the same seeds, "
    "the global one (keras.utils.set_random_seed), too; apply random maps after shard(…). A "
    "dataset that shuffles itself has another order in each pass: look at its rows on all ranks, "
    "or on none."
)
_ROWS, _X = "values or orders of rows", "x of rows with equal y"
_ADVICE = {
    "arguments": "Give every rank the same arguments.",
    _ROWS: _SAME_ORDER,
    _X: _SAME_ORDER,
}


def check_source(rows: Source, given: str, process_set: ProcessSet) -> None:
    """Raise ValueError on all ranks if their sources or arguments (``given``) cannot be used."""
    split, rows.process_set = rows.split, process_set
    # The first that differs is told; it often is why later ones do.
    facts = {
        "arguments": given,
        "rows per batch": rows.batch_size,
        "numbers of rows": rows.length,
        "shapes or dtypes of rows": _TENSOR_SPEC.sub(r"\2\1", str(rows.spec)),
        _ROWS: rows.description,
        _X: rows.x,
    }
    views = agree.gather_json("hvd.data.shard arguments", facts, process_set)
    for what in facts:
        mine = [theirs[what] for theirs in views]
        if len(set(mine)) > 1 and (what != _X or _are_other_rows(rows, process_set)):
            raise ValueError(
                f"hvd.data.shard: the ranks have different {what}: "
                f"{agree.by_rank(mine, process_set)}. {_ADVICE.get(what, _SAME_SOURCE)}"
            )
    if rows.steps == 0 or (rows.left_out and split.uneven == "error"):
        raise ValueError(
            f"hvd.data.shard: {rows.length} rows do not make whole steps of {rows.global_batch} "
            f"({split.size} ranks with batch_size={rows.batch_size}), uneven={split.uneven!r}. Use "
            "another batch_size, uneven='share' (needs a row for each rank) or 'pad' (needs y)."
        )
    # In another order, other rows are left out in each epoch; but never as many as ranks.
    ranks = process_set.size()  # with a batch size for each, split.size counts shares
    is_told = not rows.is_shuffled or rows.left_out >= ranks
    if rows.left_out and split.uneven != "trim" and is_told and not split.rank:
        log.logger.warning(
            "hvd.data.shard leaves out %s of %s rows, so that all %s ranks get the same number. "
            "uneven='pad' includes them, with sample weights (evaluation=True: for validation).",
            *(rows.left_out, rows.length, ranks),
        )
    if split.uneven == "pad" and keras.utils.unpack_x_y_sample_weight(rows.spec)[1] is None:
        raise ValueError(
            "hvd.data.shard: uneven='pad' adds sample weights and so needs y, but the source has "
            f"only x: {rows.spec}. Use 'share' or 'trim'."
        )


def _are_other_rows(rows: Source, process_set: ProcessSet) -> bool:
    """Whether rows of equal y and different x are other rows on other ranks.

    A map or a PyDataset may make x at random, so x says that only if it is the same each time.
    """

    def look() -> list[list[Any]]:
        assert rows.look is not None
        return [rows.look(), rows.look()]

    x, again = agree.on_all_ranks("hvd.data.shard", look, process_set)
    shapes, digests = [part.shape for part in x], [reading.digest([part]) for part in x]
    mine = [reading.digest(x) == reading.digest(again), shapes, digests]
    views = agree.gather_json("hvd.data.shard x", mine, process_set)
    if not all(is_constant for is_constant, *_ in views):
        if rows.reads and not rows.split.rank:
            log.warn_once(
                "hvd.data.shard: the ranks' first rows have equal y and different x, which changes "
                "in each pass. If a map changes x at random, apply it after shard(…), where each "
                "rank does so for its own rows alone. If the order is random, give it the same "
                "seed on all ranks: now some rows are used several times and others never."
            )
        return False
    call = {"process_set": process_set.id(), "name": "hvd.data.shard x"}
    differing = [i for i in range(len(x)) if len({theirs[2][i] for theirs in views}) > 1]
    # Another kind of processor may round otherwise.
    are_like = all(theirs[1] == views[0][1] for theirs in views)
    return not (are_like and all(agree.is_rounding(x[i], call) for i in differing))


def steps(
    source: Any, length: Callable[[Any], Any], kinds: str, uneven: str, process_set: ProcessSet
) -> int:
    """See ``hvd.data.agree_on_steps``; ``length`` returns that of sources of ``kinds``."""
    process_sets.check(process_set, "data.agree_on_steps")

    def look() -> int | None:
        if uneven not in ("trim", "error"):
            raise ValueError(f"{uneven=}, expected 'trim' or 'error'.")
        is_batches = isinstance(source, PyDataset)
        steps = reading.number_of_batches(source) if is_batches else length(source)
        if steps is None:
            return None
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if (whole := int(steps)) == steps:
                return whole
        raise ValueError(
            f"got {source!r:.60}, expected a number of steps, {kinds} or a keras.utils.PyDataset."
        )

    mine = agree.on_all_ranks("hvd.data.agree_on_steps", look, process_set)
    gathered = agree.gather_json("hvd.data.agree_on_steps numbers", mine, process_set)
    known = [steps for steps in gathered if steps is not None]
    if not known:
        problem = "no length is known. Pass numbers of steps (count the batches once)."
    elif min(known) < 1:
        problem = "a rank has no data. Use fewer ranks, or smaller files or batches."
    elif uneven == "error" and len(set(known)) > 1:
        problem = "the ranks' numbers of steps differ. uneven='trim' takes the least."
    else:
        return int(min(known))
    shown = ["unknown" if number is None else number for number in gathered]
    raise ValueError(
        f"hvd.data.agree_on_steps: {problem} By rank: {agree.by_rank(shown, process_set)}."
    )


def sets_of(passes: list[Passes]) -> list[str]:
    """Return the ranks that data are divided among, for ``check_sets``."""
    return sorted({one.source.process_set.text() for one in passes})


def check_sets(gathered: list[list[str]], process_set: ProcessSet) -> None:
    """Raise ValueError if a rank's data are divided among others than ``process_set``."""
    if {text for theirs in gathered for text in theirs} - {process_set.text()}:
        shown = [" and ".join(theirs) or "no shard" for theirs in gathered]
        raise ValueError(
            f"the ranks {process_set.text()} train or validate together, but hvd.data.shard has "
            f"divided their data among other ranks ({agree.by_rank(shown, process_set)}), so rows "
            "are left out or used twice. Give hvd.data.shard the process_set of the optimizer."
        )


def check_caches(gathered: list[Any]) -> None:
    """Raise ValueError if several ranks of a host, of which each gave [host, name], write a file.

    That is what ``cache`` does in its first pass.
    """
    files = [tuple(file) for theirs in gathered for file in theirs]
    if shared := {name for host, name in files if files.count((host, name)) > 1}:
        raise ValueError(
            f"dataset.cache({min(shared)!r}) is one file for several ranks, which would all write "
            "it, after hvd.data.shard with different rows. Name it by rank, "
            "dataset.cache(f'{file}-{hvd.rank()}-of-{hvd.size()}'), or cache in memory."
        )


def begun(passes: list[Passes]) -> list[Any]:
    """Return the numbers of shuffled passes, for ``check_passes``."""
    return [[one.next, one.begun, one.repeats] for one in passes if one.source.is_shuffled]


def check_passes(passes: list[Passes], gathered: list[list[Any]], process_set: ProcessSet) -> None:
    """Raise ValueError if the ranks have begun different numbers of shuffled passes.

    ``gathered`` is what ``begun`` returned on each. Of data that were ever repeated, a prefetch of
    a fast rank may have begun more than that of a slow one; all ranks then go on behind them.
    """
    shuffled = [one for one in passes if one.source.is_shuffled]
    equal = [[one[:2] for one in theirs if not one[2]] for theirs in gathered]
    if any(theirs != equal[0] for theirs in equal) or len(set(map(len, gathered))) > 1:
        numbers = [[begun for _, begun, _ in theirs] for theirs in gathered]
        raise ValueError(
            "the ranks have begun different numbers of passes over the shuffled data of "
            f"hvd.data.shard ({agree.by_rank(numbers, process_set)}), so their orders differ. "
            "Iterate over it on all ranks, or on none; mlflow.tensorflow.autolog does on "
            "one, without log_datasets=False and log_models=False. Validation data need no order: "
            "hvd.data.shard(…, shuffle=False)."
        )
    for one, of_ranks in zip(shuffled, zip(*gathered, strict=True), strict=True):
        one.catch_up(*map(max, list(zip(*of_ranks, strict=True))[:2]))
