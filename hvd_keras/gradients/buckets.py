"""What travels in which request, and to whom. benchmarks/model.py uses it without TensorFlow."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

# The first bucket is small, so that it is sent soon after backpropagation has begun (Li et al.,
# 2020, https://arxiv.org/abs/2006.15704).
FIRST_BYTES = 1 << 20


def fill(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Return the indices of the gradients in each bucket.

    Args:
        sizes: bytes of each gradient, in the order in which gradients become ready.
        limit: the most bytes of a bucket, unless its only gradient is larger; the first one holds
            at most FIRST_BYTES.
    """
    limits = itertools.chain([min(FIRST_BYTES, limit)], itertools.repeat(limit))
    buckets: list[list[int]] = []
    room = -1.0  # none: the first gradient opens a bucket, whatever its size
    for i, size in enumerate(sizes):
        if size > room:
            buckets.append([])
            room = next(limits)
        buckets[-1].append(i)
        room -= size
    return buckets


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each variable: the largest first, to the rank that has least."""
    # So no rank gets more bytes than an equal share and the largest variable.
    loads = [0] * ranks
    chosen = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[i] = loads.index(min(loads))
        loads[chosen[i]] += sizes[i]
    return chosen


@dataclasses.dataclass(frozen=True)
class Piece:
    """The elements [first, last) of a flattened tensor."""

    tensor: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Request:
    """What travels at once: a row of ``length`` elements for each owner, in pieces."""

    length: int
    rows: list[list[Piece]]  # a shorter row is padded


def pack(
    sizes: Sequence[int], owned_by: Sequence[int], ranks: int, limits: tuple[int, int]
) -> tuple[list[Request], list[int]]:
    """Lay out tensors in requests whose rows are equally long.

    Each owner's tensors follow each other, and all owners' are cut at the same places, wherever
    these lie in a tensor: so little is padded, although tensors differ in size.

    Args:
        sizes: the number of elements of each tensor, in the order in which they become ready.
        owned_by: the owner of each.
        limits: the most elements of the first request, and of each other.

    Returns:
        The requests, and the tensors that are left out: those so large that the rows of the other
        owners would be padding for the most part.
    """
    loads = [0] * ranks  # elements of each owner
    for size, owner in zip(sizes, owned_by, strict=True):
        loads[owner] += size
    alone: set[int] = set()
    # Beyond twice the bytes, an allreduce of the tensor moves less than its padded row.
    while ranks * max(loads) > 2 * sum(loads):
        fullest = loads.index(max(loads))
        largest = max(
            (i for i in range(len(sizes)) if owned_by[i] == fullest and i not in alone),
            key=lambda i: sizes[i],
        )
        alone.add(largest)
        loads[fullest] -= sizes[largest]
    # The tensors of each owner, end to end; a request has the same interval of all of them.
    streams = [
        [i for i in range(len(sizes)) if owned_by[i] == rank and i not in alone]
        for rank in range(ranks)
    ]
    lengths = itertools.chain([limits[0] // ranks], itertools.repeat(limits[1] // ranks))
    requests = []
    start = 0
    while start < max(loads):
        stop = min(start + max(1, next(lengths)), max(loads))
        rows = [_between([sizes[i] for i in stream], stream, start, stop) for stream in streams]
        requests.append(Request(stop - start, rows))
        start = stop
    return requests, sorted(alone)


def _between(sizes: list[int], tensors: list[int], start: int, stop: int) -> list[Piece]:
    """Return the pieces of tensors, one after another, that lie in [start, stop)."""
    ends = list(itertools.accumulate(sizes))
    pieces = []
    for k in range(bisect.bisect_right(ends, start), len(sizes)):
        begin = ends[k] - sizes[k]
        if begin >= stop:
            break
        first, last = max(start - begin, 0), min(stop - begin, sizes[k])
        if first < last:
            pieces.append(Piece(tensors[k], first, last))
    return pieces
