"""Records per second of one rank: hvd.data.files against tf.data.TFRecordDataset alone.

    python benchmarks/input/files.py

The files are in the page cache. Both read in turns; printed are medians, and the quartiles of the
turns' ratios. With shuffle, tf.data has a buffer of as many records as hvd.data.files
has in its window.
"""

import pathlib
import statistics
import tempfile
import time

import tensorflow as tf

import hvd_keras as hvd

FILES, BATCH, WINDOW, TURNS = 20, 32, 1 << 14, 11
SIZES = {200: 200_000, 2_000: 100_000, 100_000: 4_000}  # records, by bytes of each


def seconds(dataset, expected):
    """Return how long one pass takes; check that all records were read."""
    begin, total = time.perf_counter(), 0
    for batch in dataset:
        total += int(batch.shape[0])
    assert total == expected, (total, expected)
    return time.perf_counter() - begin


def main():
    hvd.init()
    print(
        "| bytes | shuffle | tf.data, records/s | hvd.data.files | ratio |\n|---|---|---|---|---|"
    )
    for size, number in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(pathlib.Path(folder, f"{i:02d}.tfrecord")) for i in range(FILES)]
            for path in paths:
                with tf.io.TFRecordWriter(path) as file:
                    for _ in range(number // FILES):
                        file.write(b"x" * size)
            for shuffle in (False, True):
                alone = tf.data.TFRecordDataset(paths)
                alone = alone.shuffle(WINDOW) if shuffle else alone
                alone = alone.batch(BATCH).prefetch(tf.data.AUTOTUNE)
                ours = hvd.data.shard(hvd.data.files(paths), batch_size=BATCH, shuffle=shuffle)
                turns = [(seconds(alone, number), seconds(ours, number)) for _ in range(TURNS)]
                one, two = (number / statistics.median(c) for c in zip(*turns, strict=True))
                low, ratio, high = statistics.quantiles((a / b for a, b in turns), n=4)
                print(
                    f"| {size} | {shuffle} | {one:.0f} | {two:.0f} "
                    f"| {ratio:.2f} ({low:.2f} to {high:.2f}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
