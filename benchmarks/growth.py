"""How the time grows with the number of ranks, with constant bytes per rank.

    hvdrun -np 8 --oversubscribe python benchmarks/growth.py

Process sets of 2, 4, … ranks of one job take turns. They are compared with the set of 2 and with
MPI_Allreduce on a communicator of the same ranks. Ranks that do not take part sleep. If there are
more ranks than cores, the work per core grows with the ranks.
"""

import clock  # first
import numpy as np
import report
import tensorflow as tf
from clock import MPI

import hvd_keras as hvd

BYTES = 102_400_000


def groups() -> dict[int, tuple[hvd.ProcessSet, MPI.Comm]]:
    """Returns, by size, the first ranks as a process set and as a communicator."""
    found = {}
    size = 2
    while size <= hvd.size():
        whole = size == hvd.size()
        process_set = hvd.global_process_set if whole else hvd.add_process_set(range(size))
        colour = 0 if hvd.rank() < size else MPI.UNDEFINED
        found[size] = process_set, MPI.COMM_WORLD.Split(colour)
        size *= 2
    return found


def rows_of(
    name: str,
    count: int,
    calls: int,
    repeats: int,
    groups: dict[int, tuple[hvd.ProcessSet, MPI.Comm]],
) -> list[report.Row]:
    mine = tf.fill([count], hvd.rank() + 1.0)
    buffer = np.empty(count, np.float32)
    measured = {}
    for size, (process_set, communicator) in groups.items():

        def sum_up(process_set=process_set):
            return hvd.allreduce(mine, op=hvd.Sum, name=name, process_set=process_set)

        def raw(communicator=communicator):
            communicator.Allreduce(mine.numpy(), buffer)

        ours = tf.function(sum_up, autograph=False)
        measured[f"ours {size}"] = clock.together(ours, calls, communicator)
        measured[f"raw {size}"] = clock.together(raw, calls, communicator)
        if hvd.rank() < size:
            total = size * (size + 1) / 2
            clock.expect(np.all(ours().numpy() == total), f"{name} on {size} ranks")
            raw()
            clock.expect(np.all(buffer == total), f"MPI_Allreduce on {size} ranks")
        hvd.barrier()
    times = clock.interleaved(measured, repeats)
    rows = []
    for size in groups:
        ours = times[f"ours {size}"]
        rows.append(report.compare(name, size, "MPI_Allreduce", ours, times[f"raw {size}"]))
        if size > 2:
            rows.append(report.compare(name, size, "hvd_keras, 2 ranks", ours, times["ours 2"]))
    return rows


def main() -> None:
    options = clock.options(__doc__, repeats=9)
    count = (BYTES // 1000 if options.smoke else BYTES) // 4
    by_size = groups()
    rows = rows_of(f"{count * 4 / 1e6:.3g} MB", count, 1, options.repeats, by_size)
    rows += rows_of("4 bytes", 1, 5 if options.smoke else 50, options.repeats, by_size)
    if hvd.rank() == 0:
        report.show(rows, options.json)


if __name__ == "__main__":
    main()
