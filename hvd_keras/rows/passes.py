"""The sources of ``hvd.data.shard``, and the passes over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_keras.rows import Split
from hvd_keras.runtime import log


@dataclass
class Passes:
    """Numbers the passes over a sharded source; the number decides the order."""

    next: int
    # The source, if it shuffles itself: then its order depends on how often it was begun.
    shuffling: Any
    source: "Source"
    split: Split
    begun: int = 0  # in this process, and in those that it continues
    start: int = 0  # the row at which the pass in progress began
    unread: int = 0  # steps before that row
    resume: tuple[int, int] = (0, 0)  # both, of the pass that begins next
    epoch: Sequence[int] = (0, 0)  # next and begun, when an epoch of fit began

    def begin(self) -> Any:
        """Return the number of a pass that begins, and the row at which it does: int64 [2]."""
        self._count()
        self.start, self.unread = self.resume
        self.resume = (0, 0)
        return np.array([self.next - 1, self.start])

    def begin_epoch(self) -> None:
        """Note that an epoch of ``fit`` begins, of one pass or, if the data repeat, of several."""
        self.epoch = self.next, self.begun

    def _count(self) -> None:
        self.next += 1
        self.begun += 1

    def state(self, step: int) -> list[int]:
        """What ``restore`` needs to go on at ``step`` of the epoch; 0: at the next one.

        The last two numbers are the rows that all ranks have seen of its pass, and all rows.
        """
        if not step:
            return [self.next, self.begun, 0, self.source.length]
        seen = self.start + (step - self.unread) * self.split.size * self.source.batch_size
        return [*self.epoch, seen, self.source.length]

    def seek(self, row: int) -> int:
        """Let the pass that begins next do so at ``row``; return the steps that it then lacks."""
        source, split = self.source, self.split
        if again := row % source.unit:
            row -= again
            log.logger.warning(
                "hvd.data.shard uses %s rows again, because the interrupted epoch's batches had "
                "another size than now.",
                again,
            )
        steps = split.steps_from(row, source.length, source.batch_size)
        left_out = source.length - row - steps * split.size * source.batch_size
        if split.uneven == "share" and left_out >= split.size and not split.rank:
            log.logger.warning(
                "hvd.data.shard leaves out the last %s rows of the interrupted epoch, because all "
                "batches have the same size. uneven='pad' includes them.",
                left_out,
            )
        self.resume = (row, source.steps - steps)
        if not steps:  # nothing of it is read, and so it never begins
            self._count()
            self.resume = (0, 0)
        return source.steps - steps

    def restore(self, state: list[int]) -> None:
        """Continue where another process was."""
        self.next, begun, seen, rows = state
        self.epoch = self.next, begun
        if seen and rows != self.source.length:
            raise ValueError(
                f"the data had {rows} rows when a checkpoint was written within an epoch, and now "
                f"have {self.source.length}, so the rest of the epoch is unknown. Give the same "
                "data, or begin anew with restore=False."
            )
        if self.shuffling is not None:
            # A shuffle advances its order when a pass begins, so nothing need be read.
            for _ in range(begun - self.begun):
                iter(self.shuffling)
        self.begun = begun


@dataclass
class Source:
    """An opened source of ``hvd.data.shard``."""

    spec: Any  # a type specification for each part of a row, or an example; lists are tuples
    length: int  # rows over all ranks
    batch_size: int  # rows per rank and step
    steps: int  # in a pass
    left_out: int  # rows that no rank gets
    description: str  # what else must be equal on all ranks
    is_shuffled: bool
    # Makes this rank's batches of the epoch of this number, from this row on. On TensorFlow a
    # function of both, scalar int64 tensors, that returns a tf.data.Dataset of batches; for "pad",
    # of pairs (batch, weights), where weights are float32 of shape [batch_size] and 0 for padding.
    # On PyTorch a dataset of batches by epoch, row and step.
    batches: Any
    unit: int = 0  # an epoch can begin at each row that this divides
    reads: bool = False  # those before it, then
