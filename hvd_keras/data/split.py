"""How the rows of a step are split among the ranks, and their order."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

MODES = ("share", "pad", "trim", "error")
WINDOW = 1 << 14  # rows


@dataclass(frozen=True)
class Split:
    """This rank's part of each step; ``uneven`` and ``evaluation`` as in ``hvd.data.shard``."""

    rank: int  # within the process set of ``size`` ranks
    size: int
    uneven: str
    evaluation: bool
    # With a batch size for each rank: how many equal shares this rank has, from ``rank`` on; and
    # ``size`` counts all shares.
    parts: int = 1

    def steps(self, length: int, batch_size: int) -> int:
        """Return the number of steps in a pass over ``length`` rows."""
        # "share" makes a short step if every rank gets a row; "pad" always.
        whole, rest = divmod(length, self.size * batch_size)
        return whole + {"share": rest >= self.size, "pad": rest > 0}.get(self.uneven, False)

    def has_short_step(self, length: int, batch_size: int) -> bool:
        """Whether the last step has fewer than ``batch_size`` rows on each rank."""
        global_batch = self.size * batch_size
        return self.uneven == "share" and self.steps(length, batch_size) * global_batch > length

    def steps_from(self, row: int, length: int, batch_size: int) -> int:
        """Return the number of steps in the rest of a pass, which begins at ``row``."""
        left = length - row
        if self.uneven == "share" and not self.has_short_step(length, batch_size):
            return left // (self.size * batch_size)  # batches of a static size
        return self.steps(left, batch_size)

    def places(self, first: int, rows: int, batch_size: int) -> Any:
        """Return where in the epoch's order this rank's rows of a step are: an array [count].

        ``rows`` is the number of the step's rows, over all ranks, and ``first`` the first one.
        """
        count = rows // self.size if self.uneven == "share" else batch_size
        # Rank r of N has rows r, r + N, r + 2N, … of the step; "pad" goes on at the first row.
        shares = self.rank + np.arange(self.parts)
        return (first + np.arange(count)[:, np.newaxis] * self.size + shares).reshape(-1)

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


@functools.lru_cache(4)  # called in every step
def order(length: int, shuffle: bool | int, *seeds: int) -> Any:
    """Return the order of ``length`` rows in an epoch, by numbers such as a seed and the epoch."""
    return np.random.default_rng(seeds).permutation(length) if shuffle else np.arange(length)


class Order:
    """Blocks of consecutive rows in random order, whose rows are shuffled within windows.

    It is a function of seed, epoch and place, and needs no list of all rows.

    Args:
        starts: the first row of each block, and the number of rows.
        window: about the rows of a window, which has whole blocks; None: rows keep their order.
        seed: of all ranks.
    """

    def __init__(self, starts: Any, window: int | None, seed: int) -> None:
        self._starts, self._window, self._seed = np.asarray(starts, np.int64), window, seed
        # Of two epochs, as a prefetch may begin the next; threads share them.
        self._blocks = functools.lru_cache(2)(self._blocks_of)
        self._rows = functools.lru_cache(4)(self._rows_of)

    def rows(self, epoch: int, first: int, last: int) -> Any:
        """Return the numbers of the rows at the places from ``first`` to ``last``, without that."""
        if self._window is None:
            return np.arange(first, last)
        ends = self._blocks(epoch)[2]
        parts = []
        while first < last:
            window = int(np.searchsorted(ends, first, "right"))
            begin = 0 if window == 0 else int(ends[window - 1])
            end = min(last, int(ends[window]))
            parts.append(self._rows(epoch, window)[first - begin : end - begin])
            first = end
        return np.concatenate(parts) if parts else np.arange(0)

    def blocks_in_window(self) -> int:
        """Return the largest number of blocks of a window of the first epoch."""
        if self._window is None:
            return 1
        _, places, ends = self._blocks(0)
        return int(np.diff(np.searchsorted(places, ends), prepend=0).max())

    def _blocks_of(self, epoch: int) -> tuple[Any, Any, Any]:
        """The order of the blocks, the place at which each begins, and where the windows end."""
        assert self._window is not None
        number = len(self._starts) - 1
        order = np.random.default_rng((self._seed, epoch)).permutation(number)
        places = np.cumsum(np.diff(self._starts)[order])
        # A window ends before the block whose last row reaches the next multiple of its size.
        last = np.flatnonzero(np.diff(places // self._window, append=-1))
        starts = np.concatenate([[0], places[:-1]])
        return order, starts, places[last]

    def _rows_of(self, epoch: int, window: int) -> Any:
        order, places, ends = self._blocks(epoch)
        begin = 0 if window == 0 else ends[window - 1]
        first, last = np.searchsorted(places, [begin, ends[window]])
        rows = np.concatenate(
            [np.arange(self._starts[b], self._starts[b + 1]) for b in order[first:last]]
        )
        np.random.default_rng((self._seed, epoch, window)).shuffle(rows)
        return rows
