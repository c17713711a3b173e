"""What the first rank tells the others: which function runs next, and that a step has failed."""

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import cancellation

from hvd_keras.ops.validate import raw
from hvd_keras.runtime import agree, rank_info

#: Commands; a number of 0 or more runs the function that was sent as the one of that number.
STOP, NEW, CANCEL = -1, -2, -3

_FAILED = "this step has failed on rank"


def command(number: int = STOP) -> int:
    """Tell, or on the other ranks get, what comes next."""
    (got,) = agree.run("broadcast", [np.array([number])], name="auto.command", root=0)
    return int(got[0])


@dataclasses.dataclass(frozen=True)
class Collective:
    """A request that every rank makes in a step: its kind and its name."""

    kind: str
    name: str


class Refusals:
    """A failed step's requests, of which the other ranks may wait for any: so these fail there.

    Which of them this rank had made is unknown. So it submits all of them with its own note, which
    no other rank's has, until all ranks have left the step. Then what is left of them is cancelled.
    """

    def __init__(self, collectives: Sequence[Collective]) -> None:
        self._manager = cancellation.CancellationManager()
        calls = [self._manager.get_cancelable_function(_refusal(one)) for one in collectives]
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


def _refusal(collective: Collective) -> Any:
    options: dict[str, Any] = {"tensor_name": collective.name, "process_set": 0}
    options["note"] = f"{_FAILED} {rank_info.rank()}"

    def submit() -> Any:
        nothing = tf.zeros([0], tf.uint8)
        if collective.kind == "alltoall":
            return raw.hvd_alltoall(nothing, tf.zeros([rank_info.size()], tf.int64), **options)
        more = {"root_rank": 0} if collective.kind == "broadcast" else {}
        return getattr(raw, f"hvd_{collective.kind}")([nothing], **options, **more)

    with tf.init_scope():
        return tf.compat.v1.wrap_function(submit, [])


def cancel(collectives: Sequence[Collective], error: BaseException) -> BaseException:
    """Let all ranks leave a step that failed on the first one; returns the error to raise."""
    refusals = Refusals(collectives)
    try:
        command(CANCEL)
        refusals.end()
        found = next(filter(None, share_error(None)), None)
    except tf.errors.AbortedError:  # a rank has left the job
        return error
    is_consequence = _FAILED in str(error) or "another op of the same step has" in str(error)
    if found is None or not is_consequence:
        return error
    kind = tf.errors.exception_type_from_error_code(found["code"])
    return kind(None, None, found["text"])  # type: ignore[no-any-return]


def share_error(error: BaseException | None) -> list[dict[str, Any] | None]:
    """Return each rank's own error of a cancelled step."""
    mine = None
    if error is not None and _FAILED not in str(error):
        mine = {"code": getattr(error, "error_code", tf.errors.UNKNOWN), "text": str(error)}
    return agree.gather_json("auto.error", mine)
