"""Values that differ by rank: found for a checkpoint, and given back by a restart."""

import hashlib
import json
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import shards
from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet

# Of the digests: words that are added up, and the factor by which sums are shifted.
_BLOCK, _FACTOR = 1 << 16, 0x9E3779B97F4A7C15


def random_states(process_set: ProcessSet) -> list[Any]:
    """Return every rank's state. States are large, so they are exchanged only if they differ."""
    mine = random_state()
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = agree.gather_json("checkpoint random digests", digest, process_set)
    if len(set(digests)) == 1:
        return [mine] * len(digests)
    return agree.gather_json("checkpoint random state", mine, process_set)


def mean(stack: Any) -> Any:
    """Return the ranks' mean; of integers, such as a seed, the first rank's value."""
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
    """Return the stacked values of all ranks, by index, for variables that differ by rank."""
    if process_set.size() == 1:
        return {}
    # Parts of tables have files of their own, so they do not count as different.
    mine = b"".join(b"\0" * 8 if shards.of(v) else _digest(np.asarray(v)) for v in own)
    gathered = agree.gather_bytes("checkpoint digests", mine, process_set)
    # Eight bytes per variable; only values that differ travel.
    if len({len(digests) for digests in gathered}) > 1:
        counts = [len(digests) // 8 for digests in gathered]
        raise ValueError(f"Checkpoint: the ranks train different models, of {counts} variables.")
    differing = [
        i for i in range(len(own)) if len({digests[8 * i : 8 * i + 8] for digests in gathered}) > 1
    ]
    found = {}
    for i in differing:
        value = np.asarray(own[i])
        parts = agree.gather_bytes("checkpoint by rank", value.tobytes(), process_set)
        found[i] = np.frombuffer(b"".join(parts), value.dtype).reshape(-1, *value.shape)
    return found


def _digest(value: Any) -> bytes:
    """Eight bytes that differ if an array does, but by chance; much faster than SHA-256."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    whole = data.size // 4 * 4
    words, total = data[:whole].view(np.uint32), zlib.crc32(data[whole:].tobytes())
    for first in range(0, words.size, _BLOCK):
        block = int(words[first : first + _BLOCK].sum(dtype=np.uint64))
        total = (total * _FACTOR + block) % 2**64
    return total.to_bytes(8, "little")


def random_state() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators, in a form that JSON can represent."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"python": [version, words, gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def set_random_state(state: dict[str, Any]) -> None:
    """Set the state that ``random_state`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
