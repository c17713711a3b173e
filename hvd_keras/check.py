"""``python -m hvd_keras.check`` prints the installation and runs a self-test.

Under a launcher, ``hvdrun -np 2 -m hvd_keras.check``, all ranks take part; ``hvdrun --check`` does
that.
"""

import os
import platform
import sys
import time
from typing import Any

import keras
import numpy as np

import hvd_keras as hvd
from hvd_keras.launch.onhost.cores import ranges, usable_cores, usable_gpus
from hvd_keras.lifecycle import backend
from hvd_keras.runtime import gpu, libraries

_DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "uint8"]
_SELF_TEST_SECONDS = 2.0


def facts() -> dict[str, str]:
    """Return what hvd_keras was built with and run on, as text. Works before ``init()``."""
    core = libraries.core()
    of_backend, gpus = backend.facts()
    for_gpus = gpu.facts()
    if not gpus and not usable_gpus({}):  # what is found begins with its version
        for_gpus = {k: v if v[0].isdigit() else "not needed: no GPU" for k, v in for_gpus.items()}
    return {
        "hvd_keras": f"{hvd.__version__}, in {os.path.dirname(hvd.__file__)}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        **of_backend,
        "Keras": keras.__version__,
        "MPI": libraries.mpi_version().splitlines()[0],
        "MPI library": core.hvd_mpi_file().decode(),
        "Cores": f"{usable_cores()} usable (numbers {ranges(os.sched_getaffinity(0))})",
        "GPUs": ", ".join(gpus) if gpus else "none",
        **for_gpus,
    }


def _rows(size: int) -> np.ndarray[Any, Any]:
    """Return [ranks, 4 · ranks] integers, whose sums of at most 124 are exact in all dtypes."""
    ranks, columns = np.ogrid[:size, : 4 * size]
    turn = (ranks + columns) % size  # different on each rank
    return np.where(turn < 16, turn, 0) + np.where(ranks == 0, columns % 5, 0)


def self_test() -> int:
    """Run all collectives for two seconds, and compare their results, on all ranks.

    Returns the number of collectives that ran.
    """
    rank, size = hvd.rank(), hvd.size()
    start, rounds = time.monotonic(), 0
    while hvd.broadcast(time.monotonic() - start < _SELF_TEST_SECONDS, 0, name="check.go on"):
        dtype = _DTYPES[rounds % len(_DTYPES)]
        rows_by_rank = _rows(size)
        mine = keras.ops.cast(keras.ops.convert_to_tensor(rows_by_rank[rank]), dtype)
        total = rows_by_rank.sum(0)
        rows = 4 * rank, 4 * rank + 4
        results = {
            "allreduce": (hvd.allreduce(mine, op=hvd.Sum), total),
            "allgather": (hvd.allgather(mine), rows_by_rank.ravel()),
            "broadcast": (hvd.broadcast(mine, size - 1), rows_by_rank[-1]),
            "alltoall": (hvd.alltoall(mine), rows_by_rank[:, slice(*rows)].ravel()),
            "reducescatter": (hvd.reducescatter(mine, op=hvd.Sum), total[slice(*rows)]),
        }
        for name, (got, expected) in results.items():
            if not np.array_equal(keras.ops.convert_to_numpy(got).astype("float64"), expected):
                raise AssertionError(f"{name} of {dtype}: got {got}, expected {expected}.")
        hvd.barrier()
        rounds += 1
    return rounds * 6


def main(launcher: str = "") -> None:
    """Print the facts, what started the ranks and the result of the self-test, on rank 0."""
    try:
        hvd.init()
    except RuntimeError as error:  # such as too few GPUs
        sys.exit(str(error))
    say = print if hvd.rank() == 0 else lambda *text: None
    found = {**facts(), "Launcher": launcher} if launcher else facts()
    for name, fact in found.items():
        say(f"{name + ':':<13} {fact}")
    count = self_test()
    ranks = "1 rank" if hvd.size() == 1 else f"{hvd.size()} ranks"
    say(f"{'Self-test:':<13} {count} collectives of 6 kinds on {ranks}, all correct")
    say("OK")  # the last barrier was after the last comparison, so this is so on all ranks


if __name__ == "__main__":
    main(*sys.argv[1:2])
