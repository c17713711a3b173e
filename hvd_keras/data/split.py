"""How the rows of a step are split among the ranks, and their order."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MODES = ("share", "pad", "trim", "error")
WINDOW = 1 << 14  # rows


@dataclass(frozen=True)
class Split:
    """This rank's part of each step of a pass; options as in ``hvd.data.shard``."""

    rank: int  # within the process set of ``size`` ranks
    size: int
    batch_size: Any  # rows per rank and step; None: until the source has told it
    shuffle: bool | int | None
    seed: int
    uneven: str
    evaluation: bool
    # With a batch size for each rank: how many equal shares this rank has, from ``rank`` on; and
    # ``size`` counts all shares.
    parts: int = 1
    length: int = 0  # rows over all ranks, once they are known

    @property
    def shuffles(self) -> bool:
        """Whether rows are shuffled, as by default."""
        return self.shuffle is None or bool(self.shuffle)

    @property
    def global_batch(self) -> int:
        """The number of rows in a step over all ranks."""
        return int(self.size * self.batch_size)

    @property
    def steps(self) -> int:
        """The number of steps in a pass."""
        # "share" makes a short step if every rank gets a row; "pad" always.
        whole, rest = divmod(self.length, self.global_batch)
        return whole + {"share": rest >= self.size, "pad": rest > 0}.get(self.uneven, False)

    @property
    def has_short_step(self) -> bool:
        """Whether the last step has fewer than ``batch_size`` rows on each rank."""
        return self.uneven == "share" and self.steps * self.global_batch > self.length

    @property
    def static_rows(self) -> int | None:
        """The number of rows in each of this rank's batches; None: the last has fewer."""
        # Fixed shapes let TensorFlow trace the step once; a shorter last step is a second trace.
        return None if self.has_short_step else self.batch_size * self.parts

    def steps_from(self, row: int) -> int:
        """Return the number of steps in the rest of a pass, which begins at ``row``."""
        left = self.length - row
        if self.uneven == "share" and not self.has_short_step:
            return left // self.global_batch  # batches of a static size
        return replace(self, length=left).steps

    def places(self, first: int, rows: int) -> Any:
        """Return where in the epoch's order this rank's rows of a step are: an array [count].

        ``rows`` is the number of the step's rows, over all ranks, and ``first`` the first one.
        """
        count = rows // self.size if self.uneven == "share" else self.batch_size
        # Rank r of N has rows r, r + N, r + 2N, … of the step; "pad" goes on at the first row.
        shares = self.rank + np.arange(self.parts)
        return (first + np.arange(count)[:, np.newaxis] * self.size + shares).reshape(-1)

    @property
    def left_out(self) -> int:
        """The number of rows that no rank gets in a pass."""
        rest = self.length % self.global_batch
        return {"share": rest % self.size, "pad": 0}.get(self.uneven, rest)

    def of_batches(self, counts: list[int]) -> tuple[int, int]:
        """Return the numbers of steps and of rows left out, if ``size`` batches make a step.

        ``counts`` are the rows of each batch. Not for "pad", which forms its own batches.
        """
        steps = left_out = 0
        for start in range(0, len(counts), self.size):
            group = counts[start : start + self.size]
            rows = used = sum(group)
            if self.uneven != "share":
                used = rows if rows == self.global_batch else 0
            elif len(group) < self.size or len(set(group)) > 1:
                used = rows // self.size * self.size
            steps += used > 0
            left_out += rows - used
        return steps, left_out

    def weight(self, rows: Any) -> Any:
        """Return the factor by which "pad" multiplies the weights of real rows.

        ``rows``, a number or a tensor, are the real ones of the step, over all ranks.
        """
        # Keras divides a rank's weighted sum by batch_size, and the ranks' mean divides by size.
        # One process would divide by rows.
        if self.evaluation:
            return self.steps * self.global_batch / self.length
        return self.global_batch / rows


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
        self._windows = functools.lru_cache(2)(self._windows_of)
        self._rows = functools.lru_cache(4)(self._rows_of)

    def rows(self, epoch: int, first: int, last: int) -> Any:
        """Return the numbers of the rows at the places from ``first`` to ``last``, without that."""
        if self._window is None:
            return np.arange(first, last)
        edges, parts = self._windows(epoch)[2], []
        while first < last:
            window = int(np.searchsorted(edges, first, "right")) - 1
            rows = self._rows(epoch, window)
            parts.append(rows[first - edges[window] : last - edges[window]])
            first = int(edges[window + 1])
        return np.concatenate(parts) if parts else np.arange(0)

    def blocks_in_window(self) -> int:
        """Return the largest number of blocks of a window of the first epoch."""
        return 1 if self._window is None else int(np.diff(self._windows(0)[1]).max())

    def _windows_of(self, epoch: int) -> tuple[Any, Any, Any]:
        """The order of the blocks, where in it windows begin and end, and the same in rows."""
        assert self._window is not None
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._starts) - 1)
        ends = np.cumsum(np.diff(self._starts)[order])
        # A window ends before the block whose last row reaches the next multiple of its size.
        last = np.flatnonzero(np.diff(ends // self._window, append=-1))
        return order, np.concatenate([[0], last + 1]), np.concatenate([[0], ends[last]])

    def _rows_of(self, epoch: int, window: int) -> Any:
        order, blocks, _ = self._windows(epoch)
        rows = np.concatenate(
            [
                np.arange(self._starts[b], self._starts[b + 1])
                for b in order[blocks[window] : blocks[window + 1]]
            ]
        )
        np.random.default_rng((self._seed, epoch, window)).shuffle(rows)
        return rows
