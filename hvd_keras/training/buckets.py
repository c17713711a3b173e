"""Which gradients travel together. Knows no TensorFlow, for simulations use it too."""

import itertools
from collections.abc import Sequence

# The first bucket is small, so that it is on its way soon after backpropagation has begun (Li et
# al., 2020, https://arxiv.org/abs/2006.15704).
FIRST_BYTES = 1 << 20


def fill(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Places in the list, bucket by bucket.

    ``sizes`` are in bytes, in the order in which gradients become ready. A bucket holds at most
    ``limit`` bytes, the first FIRST_BYTES; what is larger has one of its own.
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
