"""Small facts that all ranks must know of each other before they go on."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.process_sets import ProcessSet, global_process_set


def gather_json(name: str, value: Any, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's value, by rank. Works while TensorFlow traces a function, too.

    Args:
        name: identifies the call on all ranks.
        value: anything that JSON can hold.
        process_set: the ranks that take part.

    Raises:
        tf.errors.AbortedError: a rank has left the job.
    """
    if process_set.size() == 1:
        return [value]
    gathered = gather_bytes(name, json.dumps(value).encode(), process_set)
    return [json.loads(data) for data in gathered]


def gather_bytes(
    name: str, mine: bytes, process_set: ProcessSet = global_process_set
) -> list[bytes]:
    """Every rank's bytes, by rank. Works while TensorFlow traces a function, too.

    Args:
        name: identifies the call on all ranks.
        mine: any number of bytes.
        process_set: the ranks that take part.

    Raises:
        tf.errors.AbortedError: a rank has left the job.
    """

    def gather(values: Any, call: str) -> Any:
        return at_once(lambda: ops.allgather(values, call, process_set=process_set))

    lengths = gather([len(mine)], f"{name}.lengths")
    together = gather(np.frombuffer(mine, np.uint8), name).tobytes()
    ends = np.cumsum(lengths)
    return [together[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def at_once(collective: Callable[[], tf.Tensor]) -> np.ndarray[Any, Any]:
    """The result of a collective now, also while a function is traced or a graph is built.

    Args:
        collective: makes one tensor from values, not from tensors.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            with tf.device("/cpu:0"):  # no rank's GPU is needed for what the host has
                return np.asarray(collective())
    # TensorFlow 1: the user's graph runs later, and may be finalised.
    with tf.Graph().as_default(), tf.compat.v1.Session(config=_aside()) as session:
        return np.asarray(session.run(collective()))


def _aside() -> tf.compat.v1.ConfigProto:
    """For a session that settles nothing for the user's.

    The first session of a process chooses its GPUs and makes its threads, for all that follow.
    """
    return tf.compat.v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
