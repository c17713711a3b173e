"""An order of rows that is a function of seed, epoch and place, and needs no list of all rows."""

import functools
from typing import Any

import numpy as np

WINDOW = 1 << 14  # rows


class Order:
    """Blocks of consecutive rows in random order, whose rows are shuffled within windows.

    Args:
        starts: the first row of each block, and the number of rows.
        window: the rows of a window, which has whole blocks; None: rows keep their order.
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
        # A window ends with the block in which it becomes full.
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
