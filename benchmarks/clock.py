"""Measures times on several ranks, in turn. Import it first: it limits TensorFlow to one thread."""

import argparse
import os
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import mpi4py
import numpy as np

import hvd_keras as hvd

mpi4py.rc.initialize = False
hvd.init()
from mpi4py import MPI  # noqa: E402  hvd_keras has initialised it


def options(description: str, repeats: int) -> argparse.Namespace:
    """Parses the command line of a benchmark: ``repeats``, ``json`` and ``smoke``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--repeats", type=int, help=f"of each measurement (default {repeats})")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it works")
    chosen = parser.parse_args()
    chosen.repeats = chosen.repeats or (2 if chosen.smoke else repeats)
    return chosen


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """Measures the seconds of one call on this rank, as a mean of ``times`` calls."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def together(
    call: Callable[[], object], times: int = 1, group: MPI.Comm = MPI.COMM_WORLD
) -> Callable[[], float]:
    """Measures a call that all ranks of a group make, from the time when all are ready."""

    def measured() -> float:
        if group == MPI.COMM_NULL:  # this rank does not take part
            return 0.0
        group.Barrier()
        return seconds(call, times)

    return measured


def alone(call: Callable[[], object]) -> Callable[[], float]:
    """Measures a call on rank 0 while the others sleep."""
    return lambda: seconds(call) if hvd.rank() == 0 else 0.0


def interleaved(measured: dict[str, Callable[[], float]], repeats: int) -> dict[str, np.ndarray]:
    """Measures all calls in turn, ``repeats`` times after one warm-up.

    Returns:
        Seconds of the slowest rank, float64 of shape (repeats,), the same on all ranks.
    """
    table = np.zeros((repeats + 1, len(measured)))
    for row in table:
        for i, measure in enumerate(measured.values()):
            row[i] = measure()
            hvd.barrier()  # ranks that do not take part sleep here
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, table, MPI.MAX)
    return dict(zip(measured, table[1:].T, strict=True))


def expect(condition: object, what: str) -> None:
    """Ends the job if a result is wrong, since its time would be meaningless."""
    if not condition:
        raise SystemExit(f"rank {hvd.rank()}: wrong values: {what}")
