"""Statistics and timelines of the job's communication."""

import json
import os
from typing import Any

from hvd_keras import _library, agree, ops, rank_info


def stats() -> dict[str, Any]:
    """Returns what this process has exchanged since ``init()``, and how long the ranks waited.

    Takes microseconds and does not communicate: the ranks tell each other their waiting times with
    every request. The times of the latest request are known after the next one.

    Returns:
        A new dict:

        - ``"rank"``: this process's rank.
        - ``"seconds"``: the time since ``init()``.
        - ``"collectives"``: for each kind, such as ``"allreduce"``, a dict of ``"requests"``,
          ``"bytes"`` (this rank's inputs), ``"waiting_seconds"`` (until all other ranks were
          ready) and ``"moving_seconds"`` (while data moved). TensorFlow may compute meanwhile.
        - ``"ranks"``: for each rank of the job, a dict of ``"last"``, the number of times it came
          last, at least 0.1 ms after the others, and ``"awaited_seconds"``, the time that the
          others then waited for it, on average. Counts requests of this rank's process sets.

    Raises:
        ValueError: ``init()`` was not called.
    """
    rank_info.rank()  # raises if init() was not called
    counters: dict[str, Any] = json.loads(_library.core().hvd_stats())
    return counters


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts a timeline of all ranks, for https://ui.perfetto.dev or chrome://tracing.

    Call it on every rank. Rank 0 writes one file for the job and replaces an existing one. To
    record a whole job, use ``HVD_TIMELINE`` or ``hvdrun --timeline`` instead. docs/observing.md
    describes the content.

    Args:
        file_path: the file; only rank 0's value is used.
        mark_cycles: accepted for Horovod's scripts; has no effect, since there are no cycles.

    Raises:
        ValueError: ``init()`` was not called; or, on every rank, rank 0 cannot write the file or is
            already writing a timeline.
    """
    del mark_cycles
    error = ""
    if rank_info.rank() == 0:
        core = _library.core()
        if core.hvd_start_timeline(os.fsencode(file_path)) != 0:
            error = core.hvd_error().decode()
    error = agree.gather_json("start_timeline", error)[0]
    if error:
        raise ValueError(f"hvd.start_timeline: rank 0: {error}")


def stop_timeline() -> None:
    """Ends the timeline. Call it on every rank.

    Does nothing if there is none. Otherwise the timeline ends with ``shutdown()``.

    Raises:
        ValueError: ``init()`` was not called.
    """
    ops.barrier()  # the ranks' latest times are exchanged with the next request
    _library.core().hvd_stop_timeline()
    ops.barrier()  # after this, any rank may read the file
