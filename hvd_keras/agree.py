"""Small facts that all ranks must know of each other before they go on."""

import json
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops, runtime


def gather_json(name: str, value: Any) -> list[Any]:
    """Every rank's value, by rank. Works while TensorFlow traces a function, too.

    Args:
        name: identifies the call on all ranks.
        value: anything that JSON can hold.

    Raises:
        tf.errors.AbortedError: a rank has left the job.
    """
    if runtime.size() == 1:
        return [value]
    return [json.loads(data) for data in gather_bytes(name, json.dumps(value).encode())]


def gather_bytes(name: str, mine: bytes) -> list[bytes]:
    """Every rank's bytes, by rank. Works while TensorFlow traces a function, too.

    Args:
        name: identifies the call on all ranks.
        mine: any number of bytes.

    Raises:
        tf.errors.AbortedError: a rank has left the job.
    """
    with tf.init_scope():
        lengths = ops.allgather([len(mine)], f"{name}.lengths").numpy()
        together = ops.allgather(np.frombuffer(mine, np.uint8), name).numpy().tobytes()
    ends = np.cumsum(lengths)
    return [together[end - length : end] for end, length in zip(ends, lengths, strict=True)]
