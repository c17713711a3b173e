"""Gathers small values from all ranks, so that every rank can make the same decision.

Below the public collectives, because process sets are created with it.
"""

import contextlib
import contextvars
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

from hvd_keras.runtime import libraries, rank_info

if TYPE_CHECKING:
    from hvd_keras.runtime.process_sets import ProcessSet

#: This rank traces a step alone, only to create its variables: nothing may wait for other ranks.
is_building = contextvars.ContextVar("hvd_keras is building a model", default=False)

_Result = TypeVar("_Result")


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable in a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# The types that an error keeps on ranks that do not have it themselves.
_KINDS = (OSError, ValueError, TypeError, NotImplementedError, RuntimeError)


def gather_json(name: str, value: Any, process_set: "ProcessSet | None" = None) -> list[Any]:
    """Return every rank's value, by rank. Also works while TensorFlow traces a function.

    Args:
        name: identifies the call on all ranks.
        value: anything that JSON can hold.
        process_set: the ranks that take part. Default: all. It must include this rank.
    """
    if (process_set.size() if process_set else rank_info.size()) == 1:
        return [value]
    gathered = gather_bytes(name, json.dumps(value).encode(), process_set)
    return [json.loads(data) for data in gathered]


def gather_if_different(
    name: str, value: Any, process_set: "ProcessSet | None" = None
) -> list[Any] | None:
    """Return every rank's value, by rank; None if they are equal: then only hashes travel."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    if len(set(gather_json(name, digest, process_set))) == 1:
        return None
    return gather_json(f"{name} in full", value, process_set)


def gather_bytes(
    name: str, mine: bytes, process_set: "ProcessSet | None" = None, to_leader: bool = False
) -> list[bytes]:
    """Return every rank's bytes, by rank, of any number. Also works while TensorFlow traces.

    Args and errors as in ``gather_json``. With ``to_leader`` the first rank alone gets them.
    """
    rank_info.rank()  # raises if hvd.init() was not called
    if process_set is not None:
        process_set.check_included(name)
    number = 0 if process_set is None else process_set.id()
    ops = libraries.tensorflow_ops()

    def gather(values: Any, call: str) -> Any:
        return run_now(lambda: ops.hvd_allgather([values], tensor_name=call, process_set=number)[0])

    def send(values: Any, call: str) -> Any:
        splits = np.array([len(values)] + [0] * (len(lengths) - 1), np.int64)
        sent = {"tensor_name": call, "process_set": number}
        return run_now(lambda: ops.hvd_alltoall(values, splits, **sent)[0])

    # Two requests: the lengths may differ by rank, and rows have none.
    lengths = gather(np.array([len(mine)], np.int64), f"{name}.lengths")
    joined = (send if to_leader else gather)(np.frombuffer(mine, np.uint8), name).tobytes()
    if len(joined) < lengths.sum():
        return []
    ends = np.cumsum(lengths)
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def crc(values: Any, before: int = 0) -> int:
    """Hash a tensor or an array; ``before``: the hash of those before it."""
    array = np.ascontiguousarray(values).reshape(-1)
    if array.dtype.kind in "OUS":  # text
        return zlib.crc32(repr(array.tolist()).encode(), before)
    return zlib.crc32(array.view(np.uint8).data, before)


def by_rank(values: Sequence[Any], process_set: "ProcessSet | None" = None) -> str:
    """Return a text of the ranks' values, for errors: ``rank 0: 3; rank 1: 4``; without None."""
    ranks = range(len(values)) if process_set is None else process_set.ranks
    pairs = zip(ranks, values, strict=True)
    return "; ".join(f"rank {rank}: {value}" for rank, value in pairs if value is not None)


def on_all_ranks(
    name: str, function: Callable[[], _Result], process_set: "ProcessSet | None" = None
) -> _Result:
    """Call a function; an error on any rank is raised on all, with the same type and text.

    Args:
        name: begins the text of the error, and identifies the call on all ranks.
        function: may do nothing on some ranks.
        process_set: the ranks that call this. Default: all.

    Returns:
        What ``function`` returned on this rank.

    Raises:
        OSError, ValueError, TypeError, NotImplementedError: (on every rank) that of the first rank
            that has an error; an OSError has its ``errno``.
        RuntimeError: (on every rank) the function raised another error.
    """
    error = mine = None  # None travels where nothing failed
    try:
        result = function()
    except Exception as caught:
        error, own = caught, type(caught).__name__
        kind = next((k.__name__ for k in _KINDS if isinstance(caught, k)), "RuntimeError")
        text = str(caught) if own == kind else f"{own}: {caught}"
        mine = [kind, text, getattr(caught, "errno", None)]
    gathered = gather_json(name, mine, process_set)
    failed = [theirs for theirs in gathered if theirs is not None]
    if not failed:
        return result
    kind, text, number = failed[0]
    texts = [theirs and theirs[1] for theirs in gathered]
    if set(texts) != {text}:
        text = by_rank(texts, process_set)
    # A built-in type, which all ranks have; a class of the script's may need other arguments.
    combined = next(k for k in _KINDS if k.__name__ == kind)(f"{name}: {text}")
    if isinstance(combined, OSError):
        combined.errno = number
    raise combined from error


def on_leader(
    name: str, function: Callable[[], _Result], process_set: "ProcessSet"
) -> _Result | None:
    """As ``on_all_ranks``, but only the first rank calls the function; others wait for it.

    Returns what the function returned; None on the other ranks.
    """
    is_leader = process_set.rank() == 0
    return on_all_ranks(name, lambda: function() if is_leader else None, process_set)


def run_now(collective: Callable[[], tf.Tensor]) -> np.ndarray[Any, Any]:
    """Run a collective of values at once, also while a function is traced or a graph is built."""
    with tf.init_scope():
        if tf.executing_eagerly():
            with tf.device("/cpu:0"):  # the values are needed on the host
                return np.asarray(collective())
    # TensorFlow 1: the user's graph runs later and may be finalised.
    with tf.Graph().as_default(), tf.compat.v1.Session(config=_separate()) as session:
        return np.asarray(session.run(collective()))


def _separate() -> tf.compat.v1.ConfigProto:
    """Return a configuration without side effects on the user's sessions."""
    # By default, the first session of a process selects its GPUs and creates the threads of all
    # later sessions.
    return tf.compat.v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
