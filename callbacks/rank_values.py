"""Values that differ by rank: found for a checkpoint, and given back by a restart."""

import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops, shards
from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.training import variables

# Of the digests: words that are added up, and the factor by which sums are shifted.
_BLOCK, _FACTOR = 1 << 16, 0x9E3779B97F4A7C15


def random_states(process_set: ProcessSet) -> list[Any]:
    """Returns every rank's state. States are large, so they are exchanged only if they differ."""
    mine = variables.random_state()
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = agree.gather_json("checkpoint random digests", digest, process_set)
    if len(set(digests)) == 1:
        return [mine] * len(digests)
    return agree.gather_json("checkpoint random state", mine, process_set)


def mean(stack: Any) -> Any:
    """The ranks' mean; of integers, such as a seed, the first rank's value."""
    return stack[0] if stack.dtype.kind in "iu" else stack.mean(axis=0)


def to_all_ranks(shape: Sequence[int], of_dtype: Any, value: Any, process_set: ProcessSet) -> Any:
    """Broadcasts rank 0's value of this shape and dtype; as bytes, so any dtype works."""
    dtype = np.dtype(tf.as_dtype(of_dtype).as_numpy_dtype)
    if value is None:
        data = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    else:
        data = np.frombuffer(value.value.tobytes(), np.uint8)
    received = ops.broadcast(data, process_set.ranks[0], process_set=process_set)
    return np.frombuffer(received.numpy().tobytes(), dtype).reshape(shape)


def of_each_rank(own: list[Any], process_set: ProcessSet) -> dict[int, Any]:
    """Returns the stacked values of all ranks, by index, for variables that differ by rank."""
    if process_set.size() == 1:
        return {}
    # Parts of tables have files of their own, so they do not count as different.
    mine = b"".join(b"\0" * 8 if shards.of(v) else _digest(np.asarray(v)) for v in own)
    everyone = agree.gather_bytes("checkpoint digests", mine, process_set)
    if len({len(digests) for digests in everyone}) > 1:
        counts = [len(digests) // 8 for digests in everyone]
        raise ValueError(f"Checkpoint: the ranks train different models, of {counts} variables.")
    places = [
        i for i in range(len(own)) if len({digests[8 * i : 8 * i + 8] for digests in everyone}) > 1
    ]
    apart = {}
    for i in places:
        value = np.asarray(own[i])
        parts = agree.gather_bytes("checkpoint by rank", value.tobytes(), process_set)
        apart[i] = np.frombuffer(b"".join(parts), value.dtype).reshape(-1, *value.shape)
    return apart


def _digest(value: Any) -> bytes:
    """Eight bytes that differ if an array does, but by chance; much faster than SHA-256."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    whole = data.size // 4 * 4
    words, total = data[:whole].view(np.uint32), zlib.crc32(data[whole:].tobytes())
    for first in range(0, words.size, _BLOCK):
        block = int(words[first : first + _BLOCK].sum(dtype=np.uint64))
        total = (total * _FACTOR + block) % 2**64
    return total.to_bytes(8, "little")
