"""Times a function's first steps, divided and by the first rank alone, and keeps the faster way."""

import atexit
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.runtime import log, rank_info, settings

# Steps that are timed of each way, after one that is not; the fastest counts.
_STEPS = 4


class Pace:
    """Of one trace of a function."""

    def __init__(self, name: str) -> None:
        """``name`` is of the function."""
        self._name = name
        self._rows = 0  # of the steps that are timed
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._divides = True
        self._is_chosen = settings.read().always_divides

    def step(self, rows: int, divided: Callable[[], Any], whole: Callable[[], Any]) -> Any:
        """Take a step of so many rows in one of two ways."""
        if self._is_chosen:
            return divided() if self._divides else whole()
        self._rows = self._rows or rows
        if rows != self._rows:  # such as the last of an epoch
            return divided()
        begun = time.perf_counter()
        outputs = divided() if self._divides else whole()
        for leaf in tf.nest.flatten(outputs)[:1]:
            if isinstance(leaf, tf.Tensor):
                leaf.numpy()  # a GPU may still compute it
        self._seconds[self._divides].append(time.perf_counter() - begun)
        if len(self._seconds[self._divides]) > _STEPS:
            if self._divides:
                self._divides = False
            else:
                self._choose()
        return outputs

    def _choose(self) -> None:
        self._is_chosen = True
        together, alone = (min(self._seconds[way][1:]) * 1e3 for way in (True, False))
        self._divides = together <= alone
        both = f"{alone:.3g} ms a step, and {rank_info.size()} ranks take {together:.3g} ms"
        if self._divides:
            log.logger.info("hvdrun --auto divides %s: one process takes %s", self._name, both)
        else:
            text = f"hvdrun --auto: one process is faster in {self._name}: it takes {both}. Use"
            atexit.register(log.warn_once, f"{text} more hosts or a larger batch.")  # at the end
