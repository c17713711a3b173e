"""Python objects between ranks."""

import functools
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from hvd_keras import agree, ops, runtime


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None
) -> Any:
    """Gives every rank the object of one.

    Args:
        obj: anything that cloudpickle can serialise; counts on the root only.
        root_rank: the rank whose object all get.
        session: not needed: works in TensorFlow 1, too, also when the graph is finalised.
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
    length = agree.at_once(lambda: ops.broadcast(np.int64(len(data)), root_rank, f"{name}.length"))
    sent = data if is_root else np.zeros(int(length), np.uint8)
    received = agree.at_once(lambda: ops.broadcast(sent, root_rank, name))
    return obj if is_root else cloudpickle.loads(received.tobytes())


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None
) -> Callable[[Any], Any]:
    """``broadcast_object`` with all but the object settled.

    Args:
        root_rank, session, name: as in ``broadcast_object``.

    Returns:
        A function that takes this rank's object and returns the root's.

    Raises:
        As ``broadcast_object``, when it is called.

    Example:
        from_root = hvd.broadcast_object_fn(root_rank=0)
        config = from_root(config)
    """
    return functools.partial(broadcast_object, root_rank=root_rank, session=session, name=name)


def allgather_object(obj: Any, session: Any = None, name: str | None = None) -> list[Any]:
    """Gives every rank the objects of all, by rank.

    Args:
        obj: anything that cloudpickle can serialise.
        session: not needed: works in TensorFlow 1, too, also when the graph is finalised.
        name: identifies the call on all ranks.

    Returns:
        A list of ``size()`` objects.

    Raises:
        tf.errors.AbortedError: a rank has left the job.
    """
    del session
    gathered = agree.gather_bytes(name or "object", cloudpickle.dumps(obj))
    return [cloudpickle.loads(data) for data in gathered]
