"""What the ranks tell each other between steps: turns, which all of them enter in the same way.

In a turn the first rank says what comes next, and each other one whether it has failed since the
turn before. If one has, nothing comes next, and the first rank takes another turn.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import cancellation

from hvd_keras.ops.validate import raw
from hvd_keras.runtime import agree, rank_info

#: What comes next, besides a function by its number: the end, a new function, or another turn.
STOP, NEW, AGAIN = -1, -2, -3

_FAILED = "this step has failed on rank"

#: Errors of a job that a rank has left; and whether one has left this job.
LEFT = tf.errors.AbortedError, tf.errors.DeadlineExceededError
is_over = False

Failure = dict[str, Any]
#: What every rank requests in a step: kinds and names.
Requests = Sequence[tuple[str, str]]


def turn(number: int = 0, failure: Failure | None = None) -> tuple[int, list[Failure]]:
    """Take a turn: the first rank gives a number, the others what has failed; all get both."""
    global is_over
    try:
        mine = np.array([number, failure is not None])
        (got,) = agree.run("allreduce", [mine], name="auto.turn")
        failures = agree.gather_json("auto.failures", failure) if got[1] else []
    except LEFT:
        is_over = True
        raise
    return int(got[0]), [one for one in failures if one is not None]


def command(number: int) -> list[Failure]:
    """On the first rank: let something come next; returns what has failed before."""
    found: list[Failure] = []
    while failures := turn(number)[1]:
        found += failures
    return found


class Refusals:
    """A failed step's requests, of which the other ranks may wait for any: so these fail there.

    Which of them this rank had made is unknown. So it submits all of them with its own note, which
    no other rank's has, until all ranks have left the step. Then what is left of them is cancelled.
    """

    def __init__(self, requests: Requests) -> None:
        self._manager = cancellation.CancellationManager()
        calls = [self._manager.get_cancelable_function(_refusal(*one)) for one in requests]
        self._threads = [threading.Thread(target=_fail, args=[call], daemon=True) for call in calls]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Cancel what no rank waits for."""
        self._manager.start_cancel()
        for thread in self._threads:
            thread.join()


def _fail(call: Any) -> None:
    with contextlib.suppress(tf.errors.OpError):
        call()


def _refusal(kind: str, name: str) -> Any:
    options: dict[str, Any] = {"tensor_name": name, "process_set": 0}
    options["note"] = f"{_FAILED} {rank_info.rank()}"

    def submit() -> Any:
        nothing = tf.zeros([0], tf.uint8)
        if kind == "alltoall":
            return raw.hvd_alltoall(nothing, tf.zeros([rank_info.size()], tf.int64), **options)
        more = {"root_rank": 0} if kind in ("broadcast", "reduce") else {}
        return getattr(raw, f"hvd_{kind}")([nothing], **options, **more)

    with tf.init_scope():
        return tf.compat.v1.wrap_function(submit, [])


def failure_of(error: BaseException) -> Failure:
    """Describe what has failed on this rank, for the others."""
    code = getattr(error, "error_code", tf.errors.INTERNAL)
    kind = "" if isinstance(error, tf.errors.OpError) else f"{type(error).__name__}: "
    text, is_own = f"{kind}{error}", not _follows(error)
    return {"rank": rank_info.rank(), "code": code, "text": text, "is_own": is_own}


def _follows(error: BaseException) -> bool:
    """Whether what has failed on another rank is why."""
    return _FAILED in str(error) or "another op of the same step has" in str(error)


def cancel(requests: Requests, error: BaseException) -> BaseException:
    """Let all ranks leave a step that failed on the first one; returns the error to raise."""
    refusals = Refusals(requests)
    try:
        failures = command(AGAIN)
    except LEFT:
        return error
    refusals.end()
    first = next((one for one in failures if one["is_own"]), None)
    if first is None or not _follows(error):
        return error
    kind = tf.compat.v1.errors.exception_type_from_error_code(first["code"])
    text = f"{first['text']}\n(On rank {first['rank']}, in its rows of the step.)"
    return kind(None, None, text)  # type: ignore[no-any-return]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put a SIGINT off until the end of the block, in which the other ranks count on this one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
