"""Python objects between ranks."""

from typing import Any

import cloudpickle
import numpy as np

from hvd_keras import agree, ops, runtime


def broadcast_object(
    obj: Any, root_rank: int = 0, session: None = None, name: str | None = None
) -> Any:
    """Gives every rank the object of one.

    Args:
        obj: anything that cloudpickle can serialise; counts on the root only.
        root_rank: the rank whose object all get.
        session: Horovod's, for TensorFlow 1; None.
        name: identifies the call on all ranks.

    Returns:
        The root's object, a copy of it on the other ranks.

    Raises:
        ValueError: there is no such rank.
        tf.errors.AbortedError: a rank has left the job.
    """
    del session
    name = name or "object"
    is_root = runtime.rank() == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj) if is_root else b"", np.uint8)
    length = int(ops.broadcast(np.int64(len(data)), root_rank, f"{name}.length"))
    if not is_root:
        data = np.zeros(length, np.uint8)
    received = ops.broadcast(data, root_rank, name).numpy()
    return obj if is_root else cloudpickle.loads(received.tobytes())


def allgather_object(obj: Any, session: None = None, name: str | None = None) -> list[Any]:
    """Gives every rank the objects of all, by rank.

    Args:
        obj: anything that cloudpickle can serialise.
        session: Horovod's, for TensorFlow 1; None.
        name: identifies the call on all ranks.

    Returns:
        A list of ``size()`` objects.

    Raises:
        tf.errors.AbortedError: a rank has left the job.
    """
    del session
    gathered = agree.gather_bytes(name or "object", cloudpickle.dumps(obj))
    return [cloudpickle.loads(data) for data in gathered]
