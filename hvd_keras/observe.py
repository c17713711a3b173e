"""What the job does, and who waits for whom: counters and a timeline."""

import json
import os
from typing import Any

from hvd_keras import _library, agree, ops, rank_info


def stats() -> dict[str, Any]:
    """What this process has exchanged since ``init()``, and how long the ranks waited.

    Costs microseconds and no communication: the ranks tell each other of their waiting with every
    request. (What concerns the latest request is known with the next one.)

    Returns:
        A new dict:

        - ``"rank"``: of this process,
        - ``"seconds"``: since ``init()``,
        - ``"collectives"``: by kind, such as ``"allreduce"``: a dict of ``"requests"``, ``"bytes"``
          (that this rank gave), ``"waiting_seconds"`` (until all other ranks had come) and
          ``"moving_seconds"`` (while the data moved). Both pass beside the script: TensorFlow may
          compute meanwhile.
        - ``"ranks"``: for each rank of the job a dict of ``"last"``, how many times it came last,
          at least 0.1 ms after the others, and ``"awaited_seconds"``, how long the others waited
          for it then, on average. Of requests of process sets that this rank is in.

    Raises:
        ValueError: ``init()`` was not called.
    """
    rank_info.rank()  # says so, if init() was not called
    counters: dict[str, Any] = json.loads(_library.core().hvd_stats())
    return counters


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Writes from now on what all ranks do, for https://ui.perfetto.dev or chrome://tracing.

    Call it on every rank. The file is one for the job, written by rank 0; it replaces one
    that is there. To have all of a job, set ``HVD_TIMELINE`` or use
    ``hvdrun --timeline`` instead. docs/observing.md tells what is in it.

    Args:
        file_path: the file. Only rank 0's counts.
        mark_cycles: for Horovod's sake. There are no cycles that could be marked.

    Raises:
        ValueError: rank 0 cannot write there, or writes a timeline already; on every rank.
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
    """Ends the timeline, with what the ranks have done until now. Call it on every rank.

    Does nothing if there is none. Without it, the timeline ends with ``shutdown()``.

    Raises:
        ValueError: ``init()`` was not called.
    """
    ops.barrier()  # what the ranks did is known with the next request
    _library.core().hvd_stop_timeline()
    ops.barrier()  # any rank may read the file now
