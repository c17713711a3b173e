"""The latency of a call, compared with the same tf.function with tf.identity in its place.

hvdrun -np 2 python benchmarks/latency.py
"""

import clock  # first
import numpy as np
import report
import tensorflow as tf

import hvd_keras as hvd


def one() -> tuple[str, list[tf.Tensor]]:
    return "an allreduce of 4 bytes", [tf.constant([hvd.rank() + 1.0])]


def many(count: int) -> tuple[str, list[tf.Tensor]]:
    """Returns tensors of 1 KB that differ by rank, element and position."""
    values = np.arange(256, dtype="float32") + hvd.rank()
    tensors = [tf.constant(values + i) for i in range(count)]
    return f"a grouped allreduce of {count} tensors of 1 KB", tensors


def row_of(what: str, tensors: list[tf.Tensor], times: int, repeats: int) -> report.Row:
    def ours(inputs):
        if len(inputs) == 1:
            return [hvd.allreduce(inputs[0], op=hvd.Sum, name="one")]
        return hvd.grouped_allreduce(inputs, op=hvd.Sum, name="many")

    def identity(inputs):
        return [tf.identity(tensor) for tensor in inputs]

    ours, identity = (tf.function(f, autograph=False) for f in (ours, identity))
    # The ranks' inputs differ only by the rank, so the sum is known.
    others = sum(range(hvd.size())) - hvd.size() * hvd.rank()
    for mine, result in zip(tensors, ours(tensors), strict=True):
        clock.expect(np.array_equal(result, mine.numpy() * hvd.size() + others), what)
    for mine, result in zip(tensors, identity(tensors), strict=True):
        clock.expect(np.array_equal(result, mine), "identity")
    taken = clock.interleaved(
        {
            "ours": clock.together(lambda: ours(tensors), times),
            "identity": clock.together(lambda: identity(tensors), times),
        },
        repeats,
    )
    return report.compare(what, hvd.size(), "tf.identity", taken["ours"], taken["identity"])


def main() -> None:
    options = clock.options(__doc__, repeats=25)
    rows = [
        row_of(*one(), 10 if options.smoke else 200, options.repeats),
        row_of(*many(20 if options.smoke else 2000), 1 if options.smoke else 5, options.repeats),
    ]
    if hvd.rank() == 0:
        report.show(rows, options.json)


if __name__ == "__main__":
    main()
