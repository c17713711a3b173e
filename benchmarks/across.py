"""One job of hosts.py: sums over slow links. hosts.py runs it under mpirun.

Rank 0 prints a line of JSON with, for each size, the seconds of the slowest rank and the bytes that
this host has sent through its network, by repeat.
"""

import argparse
import json
from pathlib import Path

import clock  # first
import numpy as np
import tensorflow as tf
from clock import MPI

import hvd_keras as hvd

NETWORK = "eth0"


def sent() -> int:
    """Returns the bytes that this host has sent to others."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == NETWORK:
            return int(numbers.split()[8])
    raise SystemExit(f"this host has no network {NETWORK}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--raw", action="store_true", help="MPI_Allreduce instead of hvd.allreduce")
    parser.add_argument("--fp16", action="store_true")
    options = parser.parse_args()
    compression = hvd.Compression.fp16 if options.fp16 else hvd.Compression.none
    results = {}
    for size in options.bytes:
        mine = tf.constant((np.arange(size // 4) % 5 + hvd.rank()).astype("float32"))
        buffer = np.empty(size // 4, np.float32)

        def ours(tensor=mine, size=size):
            return hvd.allreduce(tensor, op=hvd.Sum, compression=compression, name=f"sum {size}")

        def raw(tensor=mine, buffer=buffer):
            MPI.COMM_WORLD.Allreduce(tensor.numpy(), buffer)

        call = raw if options.raw else tf.function(ours, autograph=False)
        others = sum(range(hvd.size())) - hvd.size() * hvd.rank()
        total = call()
        total = buffer if options.raw else total.numpy()
        wanted = mine.numpy() * hvd.size() + others
        clock.expect(np.array_equal(total, wanted), f"the sum of {size} bytes")
        times, crossed = [], []
        for _ in range(options.repeats):
            MPI.COMM_WORLD.Barrier()
            before = sent()
            seconds = clock.seconds(call)
            times.append(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))
            crossed.append(sent() - before)
        results[size] = {"seconds": times, "sent": crossed}
    if hvd.rank() == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
