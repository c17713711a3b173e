"""Broadcast and allgather of Python objects."""

import functools
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from hvd_keras.runtime import agree, process_sets, rank_info
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the root rank's object.

    Args:
        obj: any object that cloudpickle can serialise; only the root's is used.
        root_rank: the rank whose object all ranks get.
        session: not needed, also in TensorFlow 1, even if the graph is finalised.
        name: identifies the call on all ranks.
        process_set: the ranks that take part.

    Returns:
        The root's object; a copy of it on the other ranks.

    Raises:
        ValueError: ``root_rank`` or this rank is not in the process set.
        TypeError: no rank can serialise its object. If only some cannot, all ranks get a
            ``tf.errors.FailedPreconditionError``.
        tf.errors.AbortedError: a rank has left the job.
    """
    del session
    name = name or "object"
    is_root = rank_info.rank() == root_rank
    process_sets.check(process_set, "broadcast_object")
    call = {"root": root_rank, "process_set": process_set.id()}
    with agree.refused_on_all_ranks("broadcast", f"{name}.length", process_set, root=root_rank):
        data = np.frombuffer(_dumped(obj) if is_root else b"", np.uint8)
    try:
        # Broadcasts need a shape that all ranks know.
        size = np.array(len(data))
        (size,) = agree.run("broadcast", [size], name=f"{name}.length", **call)
        sent = data if is_root else np.zeros(int(size), np.uint8)
        (received,) = agree.run("broadcast", [sent], name=name, **call)
    except Exception:
        process_set.check_root(root_rank)  # a better error, if all ranks have the same
        raise
    return obj if is_root else cloudpickle.loads(received.tobytes())


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return ``broadcast_object`` with all arguments except the object.

    Args:
        root_rank, session, name, process_set: as in ``broadcast_object``.

    Returns:
        A function that takes this rank's object and returns the root's.

    Raises:
        As ``broadcast_object``, when it is called.

    Example:
        from_root = hvd.broadcast_object_fn(root_rank=0)
        config = from_root(config)
    """
    return functools.partial(
        broadcast_object, root_rank=root_rank, session=session, name=name, process_set=process_set
    )


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give every rank the objects of all ranks.

    Args:
        obj: any object that cloudpickle can serialise.
        session: not needed, also in TensorFlow 1, even if the graph is finalised.
        name: identifies the call on all ranks.
        process_set: the ranks that take part.

    Returns:
        A list of the ranks' objects, in rank order.

    Raises:
        ValueError: this rank is not in the process set.
        TypeError: no rank can serialise its object. If only some cannot, all ranks get a
            ``tf.errors.FailedPreconditionError``.
        tf.errors.AbortedError: a rank has left the job.
    """
    del session
    name = name or "object"
    process_sets.check(process_set, "allgather_object")
    with agree.refused_on_all_ranks("allgather", f"{name}.lengths", process_set):
        data = _dumped(obj)
    return [cloudpickle.loads(theirs) for theirs in agree.gather_bytes(name, data, process_set)]


def _dumped(obj: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(obj))
    except Exception as error:  # of the object's own methods, too
        raise TypeError(f"{type(obj).__name__} cannot be serialised: {error}") from error
