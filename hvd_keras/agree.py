"""Gathers small values from all ranks, so that every rank can make the same decision.

Below the public collectives, because process sets are created with it.
"""

import json
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvd_keras import _library, rank_info


class Group(Protocol):
    """The part of a ``ProcessSet`` that this module needs."""

    def id(self) -> int:
        """Its number, the same on all ranks."""

    def size(self) -> int:
        """The number of its ranks."""

    def check_included(self, caller: str) -> None:
        """Raises ValueError if this rank is not in it."""


def gather_json(name: str, value: Any, process_set: Group | None = None) -> list[Any]:
    """Returns every rank's value, by rank. Also works while TensorFlow traces a function.

    Args:
        name: identifies the call on all ranks.
        value: anything that JSON can hold.
        process_set: the ranks that take part. Default: all.

    Raises:
        ValueError: this rank is not in the process set.
        tf.errors.AbortedError: a rank has left the job.
    """
    if (process_set.size() if process_set else rank_info.size()) == 1:
        return [value]
    gathered = gather_bytes(name, json.dumps(value).encode(), process_set)
    return [json.loads(data) for data in gathered]


def gather_bytes(name: str, mine: bytes, process_set: Group | None = None) -> list[bytes]:
    """Returns every rank's bytes, by rank. Also works while TensorFlow traces a function.

    Args:
        name: identifies the call on all ranks.
        mine: any number of bytes.
        process_set: the ranks that take part. Default: all.

    Raises:
        ValueError: this rank is not in the process set.
        tf.errors.AbortedError: a rank has left the job.
    """
    rank_info.rank()  # raises if hvd.init() was not called
    if process_set is not None:
        process_set.check_included(name)
    number = 0 if process_set is None else process_set.id()
    allgather = _library.tensorflow_ops().hvd_allgather

    def gather(values: Any, call: str) -> Any:
        return run_now(lambda: allgather([values], tensor_name=call, process_set=number)[0])

    lengths = gather(np.array([len(mine)], np.int64), f"{name}.lengths")
    together = gather(np.frombuffer(mine, np.uint8), name).tobytes()
    ends = np.cumsum(lengths)
    return [together[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def run_now(collective: Callable[[], tf.Tensor]) -> np.ndarray[Any, Any]:
    """Runs a collective immediately, also while a function is traced or a graph is built.

    Args:
        collective: returns one tensor; its inputs must be values, not tensors.

    Returns:
        The tensor's values.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            with tf.device("/cpu:0"):  # the values are needed on the host
                return np.asarray(collective())
    # TensorFlow 1: the user's graph runs later and may be finalised.
    with tf.Graph().as_default(), tf.compat.v1.Session(config=_separate()) as session:
        return np.asarray(session.run(collective()))


def _separate() -> tf.compat.v1.ConfigProto:
    """A session configuration without side effects on the user's sessions.

    By default, the first session of a process selects its GPUs and creates the threads of all later
    sessions.
    """
    return tf.compat.v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
