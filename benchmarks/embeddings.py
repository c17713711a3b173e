"""A table divided between ranks, compared with one on each rank: memory, bytes moved, step time.

    hvdrun -np 2 python benchmarks/embeddings.py

A step looks up BATCH x IDS ids of each rank, whose frequencies follow a power law, and updates the
table with Adagrad. Compared are ``hvd.layers.Embedding``, divided by rows; Keras's layer, whose
sparse gradients all ranks exchange; and the bound: three ``hvd.alltoall`` in a ``tf.function`` that
move as many bytes as the divided table's ids, rows and gradients, and compute nothing. Steps are
measured in turn, from the time when all ranks are ready to the end of the slowest.
"""

import argparse
import json
import time

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

IDS = 26  # of one sample


def make(layer, ids):
    """Returns a step, and the variables that it updates."""
    layer.build()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adagrad(0.01))
    optimizer.build(layer.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(ids) - 1.0))
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply(gradients, layer.trainable_variables)

    tables = [v for v in optimizer.variables if len(v.shape) == 2]
    return step, [*layer.trainable_variables, *tables]


def make_bound(counts):
    """Returns a step that moves a number of bytes by each alltoall."""
    size = hvd.size()
    buffers = [tf.zeros([count // size * size], tf.uint8) for count in counts]

    @tf.function
    def step():
        for i, buffer in enumerate(buffers):
            hvd.alltoall(buffer, name=f"bound {i}")

    return step


def moved():
    kinds = hvd.stats()["collectives"]
    return sum(kinds[k]["bytes"] for k in ("alltoall", "allgather", "allreduce") if k in kinds)


def seconds(step):
    hvd.allreduce(0.0, name="ready")
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="of the table (default 200000)")
    parser.add_argument("--width", type=int, default=64, help="of a row (default 64)")
    parser.add_argument("--batch", type=int, default=1024, help="samples of a rank (default 1024)")
    parser.add_argument("--repeats", type=int, default=20, help="(default 20)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    options = parser.parse_args()
    hvd.init()
    random = np.random.default_rng(hvd.rank())
    ids = np.minimum(random.zipf(1.2, (options.batch, IDS)), options.rows) - 1
    unique = len(np.unique(ids))
    shape = options.rows, options.width
    divided, its = make(hvd.layers.Embedding(*shape, shard="rows"), tf.constant(ids))
    whole, all_of_it = make(keras.layers.Embedding(*shape), tf.constant(ids))
    hvd.broadcast_variables(all_of_it, 0)
    item = 4 * options.width
    steps = {
        "divided by rows": divided,
        "whole on each rank": whole,
        "bound": make_bound([8 * ids.size, item * unique, item * ids.size]),
    }
    bytes_moved = {}
    for name, step in steps.items():  # the first call traces
        step()
        before = moved()
        step()
        bytes_moved[name] = moved() - before
    times = np.array([[seconds(step) for step in steps.values()] for _ in range(options.repeats)])
    times = np.median(hvd.allreduce(times, op=hvd.Max, name="times").numpy(), axis=0)
    memory = [sum(int(np.prod(v.shape)) * 4 for v in found) for found in (its, all_of_it)]
    rows = [
        {
            "what": name,
            "ranks": hvd.size(),
            "ms": float(ms * 1e3),
            "sent": bytes_moved[name],
            "memory": m,
        }
        for name, ms, m in zip(steps, times, [*memory, 0], strict=True)
    ]
    if hvd.rank() > 0:
        return
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"{hvd.size()} ranks, {shape[0]} x {shape[1]} float32, {ids.size} ids a step and rank, "
        f"{unique} of them different; medians of {options.repeats}\n\n"
        "| table | MB of table and slots on a rank | MB sent in a step | ms a step |\n"
        "|---|---|---|---|"
    )
    for row in rows:
        memory_text = f"{row['memory'] / 1e6:.1f}" if row["memory"] else "-"
        print(f"| {row['what']} | {memory_text} | {row['sent'] / 1e6:.2f} | {row['ms']:.1f} |")


if __name__ == "__main__":
    main()
