"""How the rows of a step are split among the ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

MODES = ("share", "pad", "trim", "error")


@dataclass(frozen=True)
class Split:
    """This rank's part of each step; ``uneven`` and ``evaluation`` as in ``hvd.data.shard``."""

    rank: int  # within the process set of ``size`` ranks
    size: int
    uneven: str
    evaluation: bool

    def steps(self, length: int, batch_size: int) -> int:
        """Return the number of steps in a pass over ``length`` rows."""
        # "share" makes a short step if every rank gets a row; "pad" always.
        whole, rest = divmod(length, self.size * batch_size)
        return whole + {"share": rest >= self.size, "pad": rest > 0}.get(self.uneven, False)

    def has_short_step(self, length: int, batch_size: int) -> bool:
        """Whether the last step has fewer than ``batch_size`` rows on each rank."""
        global_batch = self.size * batch_size
        return self.uneven == "share" and self.steps(length, batch_size) * global_batch > length

    def left_out(self, length: int, batch_size: int) -> int:
        """Return the number of rows that no rank gets in a pass over ``length`` rows."""
        rest = length % (self.size * batch_size)
        return {"share": rest % self.size, "pad": 0}.get(self.uneven, rest)

    def of_batches(self, counts: list[int], batch_size: int) -> tuple[int, int]:
        """Return the numbers of steps and of rows left out, if ``size`` batches make a step.

        ``counts`` are the rows of each batch. Not for "pad", which forms its own batches.
        """
        steps = left_out = 0
        for start in range(0, len(counts), self.size):
            group = counts[start : start + self.size]
            rows = used = sum(group)
            if self.uneven != "share":
                used = rows if rows == self.size * batch_size else 0
            elif len(group) < self.size or len(set(group)) > 1:
                used = rows // self.size * self.size
            steps += used > 0
            left_out += rows - used
        return steps, left_out

    def weight(self, rows: Any, length: int, batch_size: int) -> Any:
        """Return the factor by which "pad" multiplies the weights of real rows.

        ``rows``, a number or a tensor, are the real ones of the step, over all ranks.
        """
        # Keras divides a rank's weighted sum by batch_size, and the ranks' mean divides by size.
        # One process would divide by rows.
        global_batch = self.size * batch_size
        if self.evaluation:
            return self.steps(length, batch_size) * global_batch / length
        return global_batch / rows


@dataclass
class Passes:
    """Numbers the passes over a sharded source; the number decides the order."""

    next: int
    # The source, if it shuffles itself: then its order depends on how often it was begun.
    shuffling: tf.data.Dataset | None
    is_shuffled: bool  # whether passes have different orders
    begun: int = 0  # in this process, and in those that it continues

    def begin(self) -> int:
        """Return the number of a pass that begins."""
        self.next += 1
        self.begun += 1
        return self.next - 1

    def state(self, within: bool) -> list[int]:
        """What ``restore`` needs to repeat the pass that has begun (``within``), or the next."""
        return [self.next - within, self.begun - within]

    def restore(self, state: list[int]) -> None:
        """Continues where another process was."""
        self.next, begun = state
        if self.shuffling is not None:
            # A shuffle advances its order when a pass begins, so nothing need be read.
            for _ in range(begun - self.begun):
                iter(self.shuffling)
        self.begun = begun


@dataclass
class Source:
    """An opened source of ``hvd.data.shard``."""

    spec: Any  # a type specification for each part of a row; lists are tuples
    length: int  # rows over all ranks
    batch_size: int  # rows per rank and step
    steps: int  # in a pass
    left_out: int  # rows that no rank gets
    description: str  # what else must be equal on all ranks
    is_shuffled: bool
    # Makes this rank's batches of the epoch of this number, a scalar int64 tensor; for "pad", pairs
    # (batch, weights), where weights are float32 of shape [batch_size] and 0 for padding.
    batches: Callable[[tf.Tensor], tf.data.Dataset]
