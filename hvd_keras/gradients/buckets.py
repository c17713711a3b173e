"""Assigns gradients to buckets. Without TensorFlow, because benchmarks/model.py uses it, too."""

import itertools
from collections.abc import Sequence

# The first bucket is small, so that it is sent soon after backpropagation has begun (Li et al.,
# 2020, https://arxiv.org/abs/2006.15704).
FIRST_BYTES = 1 << 20


def fill(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Return the indices of the gradients in each bucket.

    Args:
        sizes: bytes of each gradient, in the order in which gradients become ready.
        limit: the most bytes of a bucket; the first one holds at most FIRST_BYTES. A larger
            gradient gets a bucket of its own.
    """
    limits = itertools.chain([min(FIRST_BYTES, limit)], itertools.repeat(limit))
    buckets: list[list[int]] = []
    room = -1.0
    for i, size in enumerate(sizes):
        if size > room:
            buckets.append([])
            room = next(limits)
        buckets[-1].append(i)
        room -= size
    return buckets
