"""Exchanges an embedding's gradient as rows and as a whole table: which is faster?

    hvdrun -np 2 python benchmarks/sparse.py

Each rank uses different rows of a ROWS x WIDTH float32 table, a fraction k / ROWS of them. The
gradient is exchanged as rows (as hvd does with tf.IndexedSlices) and as a table built from the same
rows (as with sparse_as_dense=True). Both are measured in turn, in one run, and compared element by
element: the exchange alone, and the exchange with an update of the table by plain subtraction.
Printed are medians of the slowest rank, and the fraction at which both take the same time.

Last, USED rows of a larger table: a tf.function that exchanges them, less the same function with
tf.identity in place of the exchange, is compared with two MPI_Allgatherv of equally many values and
indices between existing buffers.
"""

import argparse
import time

import clock  # first
import numpy as np
import report
import tensorflow as tf
from clock import MPI

import hvd_keras as hvd

LARGE, USED = 100_000, 4096
FRACTIONS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def ways(table):
    """Returns the two ways of exchange, each with an optional update of the table."""

    def as_rows(values, indices, update):
        slices = tf.IndexedSlices(values, indices, tf.shape(table, tf.int64))
        rows = hvd.allreduce(slices, op=hvd.Sum, name="rows")
        return table.scatter_sub(rows) if update else rows

    def as_table(values, indices, update):
        slices = tf.IndexedSlices(values, indices, tf.shape(table, tf.int64))
        gradient = hvd.allreduce(tf.convert_to_tensor(slices), op=hvd.Sum, name="table")
        return table.assign_sub(gradient) if update else gradient

    return tf.function(as_rows, reduce_retracing=True), tf.function(as_table, reduce_retracing=True)


def seconds(function, *arguments):
    """Measures one call, from the time when all ranks are ready."""
    hvd.allreduce(0.0, name="ready")
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def measured(table, used, repeats):
    """Returns the slowest rank's seconds by repeat: rows, table, rows and table with update."""
    as_rows, as_table = ways(table)
    random = np.random.default_rng(hvd.rank())
    indices = tf.constant(random.choice(table.shape[0], used, replace=False).astype("int64"))
    # Small integers, whose sums are exact, so that both ways must give equal bits.
    values = tf.constant(random.integers(-9, 10, (used, table.shape[1])).astype("float32"))
    sparse, dense = (way(values, indices, False) for way in (as_rows, as_table))
    if not np.array_equal(tf.convert_to_tensor(sparse), dense):
        raise SystemExit(f"rank {hvd.rank()}: the two ways differ with {used} rows")
    calls = [(way, update) for update in (False, True) for way in (as_rows, as_table)]
    times = [[seconds(way, values, indices, update) for way, update in calls]]
    times += [
        [seconds(way, values, indices, update) for way, update in calls] for _ in range(repeats)
    ]
    return hvd.allreduce(np.transpose(times[1:]), op=hvd.Max, name="times").numpy()


def beside_mpi(rows, used, width, repeats):
    """Measures the row that compares with MPI_Allgatherv."""
    random = np.random.default_rng(hvd.rank())
    mine = random.integers(rows, size=used)
    values = random.integers(-9, 10, (used, width)).astype("float32")
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(mine), tf.constant([rows, width]))
    exchange = tf.function(lambda slices: hvd.allreduce(slices, op=hvd.Sum, name="large"))
    identity = tf.function(
        lambda slices: tf.IndexedSlices(tf.identity(slices.values), tf.identity(slices.indices))
    )
    all_values = np.empty((hvd.size() * used, width), np.float32)
    all_indices = np.empty(hvd.size() * used, np.int64)
    counts = np.full(hvd.size(), used)

    def allgather():
        MPI.COMM_WORLD.Allgatherv(values, (all_values, counts * width))
        MPI.COMM_WORLD.Allgatherv(mine, (all_indices, counts))

    allgather()
    got = exchange(slices)
    clock.expect(np.array_equal(got.values, all_values), "an embedding's values")
    clock.expect(np.array_equal(got.indices, all_indices), "an embedding's indices")
    sent = np.s_[hvd.rank() * used : (hvd.rank() + 1) * used]
    clock.expect(np.array_equal(all_values[sent], values), "MPI_Allgatherv")
    ways = {
        "ours": lambda: exchange(slices),
        "identity": lambda: identity(slices),
        "raw": allgather,
    }
    times = clock.interleaved({w: clock.together(f, 10) for w, f in ways.items()}, repeats)
    what = f"{used} rows of an embedding {rows} x {width}, exchange"
    return report.compare(
        what, hvd.size(), "MPI_Allgatherv", times["ours"] - times["identity"], times["raw"]
    )


def lookups(rows, used, width, repeats):
    """Measures the row that compares ways to read a table; on rank 0 alone."""
    table = tf.Variable(tf.random.stateless_normal([rows, width], [1, 2]))
    indices = tf.constant(np.random.default_rng(hvd.rank()).integers(rows, size=used))
    ways = {
        "ours": tf.function(lambda: tf.gather(table, indices)),
        "keras": tf.function(lambda: tf.gather(tf.convert_to_tensor(table), indices)),
    }
    expected = table.numpy()[indices.numpy()]
    table.scatter_sub(tf.IndexedSlices(tf.ones([1, width]), tf.constant([0])))
    table.scatter_add(tf.IndexedSlices(tf.ones([1, width]), tf.constant([0])))
    for way, read in ways.items():
        clock.expect(np.allclose(read(), expected, atol=1e-5), f"a lookup, {way}")
    times = clock.interleaved({w: clock.alone(f) for w, f in ways.items()}, repeats)
    what = f"a lookup of {used} rows in {rows} x {width}"
    return report.compare(what, 1, "reading the whole table", times["ours"], times["keras"])


def break_even(fractions, ratios):
    """Interpolates the fraction at which the ratio passes 1; None if it does not."""
    for i in range(1, len(ratios)):
        if ratios[i - 1] < 1 <= ratios[i]:
            share = (1 - ratios[i - 1]) / (ratios[i] - ratios[i - 1])
            return fractions[i - 1] + share * (fractions[i] - fractions[i - 1])
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000, help="of the table (default 50000)")
    parser.add_argument("--width", type=int, default=64, help="of a row (default 64)")
    parser.add_argument("--repeats", type=int, default=30, help="of each measurement (default 30)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, as a quick check")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.repeats = 1000, 2

    def say(text):
        if hvd.rank() == 0 and not options.json:
            print(text, flush=True)

    say(
        f"{hvd.size()} ranks, a table of {options.rows} x {options.width} float32 "
        f"({options.rows * options.width * 4 / 1e6:.1f} MB), medians of {options.repeats}\n"
    )
    table = tf.Variable(tf.zeros([options.rows, options.width]))
    say(
        "| rows used per rank | as rows, ms | as a table, ms | ratio | ratio with update |\n"
        "|---|---|---|---|---|"
    )
    ratios, results = [], []
    for fraction in FRACTIONS:
        used = max(1, round(fraction * options.rows))
        times = measured(table, used, options.repeats)
        for how, ours, theirs in (("exchange", *times[:2]), ("with update", *times[2:])):
            what = f"an embedding's gradient as rows, {fraction:.1%} used, {how}"
            results.append(report.compare(what, hvd.size(), "as a table", ours, theirs))
        rows, dense, rows_update, dense_update = np.median(times, axis=1) * 1e3
        ratios.append((rows / dense, rows_update / dense_update))
        say(
            f"| {fraction:.1%} | {rows:.2f} | {dense:.2f} | "
            f"{ratios[-1][0]:.2f} | {ratios[-1][1]:.2f} |"
        )
    for what, column in zip(("exchange", "with update"), zip(*ratios, strict=True), strict=True):
        even = break_even(FRACTIONS, column)
        say(
            f"{what}: "
            + (
                "rows are faster at every fraction"
                if even is None
                else f"equal at {even:.0%} of the rows"
            )
        )
    large, used = (options.rows, 100) if options.smoke else (LARGE, USED)
    results.append(beside_mpi(large, used, options.width, options.repeats))
    results.append(lookups(options.rows, used, options.width, options.repeats))
    say(f"\n{report.table(results[-2:])}")
    if options.json and hvd.rank() == 0:
        report.show(results, as_json=True)


if __name__ == "__main__":
    main()
