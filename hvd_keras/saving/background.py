"""Work in a thread of each rank while training goes on, the end of which all ranks learn at once.

The threads only write files. Collectives stay in the main thread, in the same order on all ranks.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_keras.runtime import agree, log
from hvd_keras.runtime.process_sets import ProcessSet

Step = tuple[str, Callable[[], Any]]  # what begins the text of an error, and the work

_thread = concurrent.futures.ThreadPoolExecutor(1, "hvd-checkpoint")
_running: set[concurrent.futures.Future[Any]] = set()


class Background:
    """Steps of work; each begins when all ranks have done the one before.

    All ranks call its methods in the same order. These raise what ``agree.on_all_ranks`` does.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._future: concurrent.futures.Future[Any] | None = None
        self._left: list[Step] = []
        self._undo: Callable[[], Any] = bool

    def begin(self, steps: list[Step], undo: Callable[[], Any]) -> None:
        """Begin work when none is in progress; ``undo`` is called on all ranks if a step fails."""
        assert self._future is None
        self._left, self._undo = steps, undo
        self._submit()

    def look(self) -> None:
        """Go on if all ranks are done with a step; raise its error. Free if nothing runs."""
        if self._future is None:
            return
        is_done = np.array([self._future.done()], np.int32)
        call = {"name": "Checkpoint is written", "process_set": self._process_set.id()}
        if self._process_set.size() > 1:
            (is_done,) = agree.run("allreduce", [is_done], reduction="Min", **call)
        if is_done[0]:
            self._go_on()

    def finish(self) -> None:
        """Wait for all steps; raise an error of one."""
        while self._future is not None:
            self._go_on()

    def forget(self) -> None:
        """Give up the steps that have not begun, of work that an exception has interrupted."""
        self._future, self._left = None, []

    def _submit(self) -> None:
        self._future = _thread.submit(self._left[0][1])
        _running.add(self._future)

    def _go_on(self) -> None:
        future, (name, _) = self._future, self._left.pop(0)
        assert future is not None
        self._future = None
        try:
            agree.on_all_ranks(name, future.result, self._process_set)
        except Exception:
            self._left.clear()
            self._undo()
            raise
        finally:
            if future.done():  # not if an interrupt came while it was waited for
                _running.discard(future)
        if self._left:
            self._submit()


def wait() -> None:
    """Wait for this rank's step, which an exception may have left in progress."""
    for future in [*_running]:
        if error := future.exception():
            log.logger.warning("Checkpoint: cannot write: %s", error)
        _running.discard(future)
