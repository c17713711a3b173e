"""The CPU time of a rank that waits for another one, as a share of a core.

hvdrun -np 2 python benchmarks/waiting.py
"""

import argparse
import os
import resource
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import mpi4py
import report

import hvd_keras as hvd


def cpu_seconds() -> float:
    """Returns the CPU time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def share_of_a_core(wait, late_by: float) -> float:
    """Calls ``wait``, on the last rank late; returns this rank's CPU time per second."""
    hvd.barrier()
    cpu, start = cpu_seconds(), time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(late_by)
    wait()
    return (cpu_seconds() - cpu) / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="how late a rank comes")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no text")
    parser.add_argument("--smoke", action="store_true", help="one second, as a quick check")
    options = parser.parse_args()
    seconds = 1.0 if options.smoke else options.seconds
    hvd.init()
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    if hvd.size() < 2:
        raise SystemExit("This needs at least two ranks: start it with hvdrun -np 2.")
    ours = share_of_a_core(lambda: hvd.allreduce(1.0), seconds)
    mpi = share_of_a_core(MPI.COMM_WORLD.Barrier, seconds)
    if hvd.rank() == 0 and options.json:
        what = f"CPU time, waiting {seconds:g} s"
        row = report.compare(what, hvd.size(), "MPI_Barrier", [ours * seconds], [mpi * seconds])
        report.show([row], as_json=True)
    elif hvd.rank() == 0:
        print(f"waiting {seconds:g} s: hvd.allreduce {ours:.1%} of a core, MPI_Barrier {mpi:.1%}")


if __name__ == "__main__":
    main()
