"""Times a function's steps by the first rank alone, then divided, and keeps the faster way."""

import atexit
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.runtime import log, rank_info, settings

# Steps that are timed of each way, after one that is not; the fastest counts.
_STEPS = 4
# To divide a function takes a few times as long as its first step, which traces it. It is tried
# once the next steps have taken so many times as long, so that short jobs do not pay for it.
_WORTH = 5

Way = Callable[[], Any]

_has_tried = False  # to divide any function
_why = ""  # if not


def note_update(apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace ``keras.optimizers.Optimizer.apply``: the script trains."""
    global _why
    _why = _why or "None was one that it divides: see docs/auto.md."
    return apply(*args, **kwargs)


def tell_untried() -> None:
    """Warn, at the end of the script, that no step was divided."""
    if _why and not _has_tried:
        log.warn_once(f"hvdrun --auto: one process has computed all steps. {_why}")


class Pace:
    """Of one trace of a function."""

    def __init__(self, name: str) -> None:
        """``name`` is of the function."""
        self._name = name
        self._rows = 0  # of the steps that are timed
        self._alone: list[float] = []  # seconds of steps
        self._together: list[float] = []
        self._divided: Callable[[list[Any]], Any] | None = None
        self._is_chosen = False
        global _why
        ranks = rank_info.size()
        _why = f"They took too little time to try whether {ranks} ranks are faster."

    def step(self, tensors: list[Any], rows: int, whole: Way, divide: Callable[[], Any]) -> Any:
        """Take a step with these tensors in one of two ways.

        ``divide`` takes one, and returns the second way for the next, or None, and its outputs.
        """
        always = settings.read().always_divides
        first, *others = self._alone or [0.0]
        is_due = always or (len(others) >= _STEPS and sum(others) >= _WORTH * first)
        global _has_tried
        _has_tried |= is_due
        if is_due and self._divided is None and not self._is_chosen:
            self._divided, outputs = divide()
            self._is_chosen = always or self._divided is None
            return outputs
        run, self._rows = self._divided, self._rows or rows
        begun = time.perf_counter()
        outputs = run(tensors) if run else whole()
        if self._is_chosen or rows != self._rows:  # such as the last of an epoch
            return outputs
        for leaf in tf.nest.flatten(outputs)[:1]:
            if isinstance(leaf, tf.Tensor):
                leaf.numpy()  # a GPU may still compute it
        (self._together if run else self._alone).append(time.perf_counter() - begun)
        if len(self._together) > _STEPS:
            self._choose()
        return outputs

    def _choose(self) -> None:
        self._is_chosen = True
        together, alone = (min(some[1:]) * 1e3 for some in (self._together, self._alone))
        both = f"{alone:.3g} ms a step, and {rank_info.size()} ranks take {together:.3g} ms"
        if together <= alone:
            log.logger.info("hvdrun --auto divides %s: one process takes %s", self._name, both)
            return
        self._divided = None
        text = f"hvdrun --auto: one process is faster in {self._name}: it takes {both}. Use"
        atexit.register(log.warn_once, f"{text} more hosts or a larger batch.")  # at the end
