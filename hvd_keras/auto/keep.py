"""Variables that a function only reads: the other ranks have got their values, and keep them.

They get them again once they have changed. The first rank holds what it has sent, and a variable
whose memory is held moves when it is assigned. So one with the same memory, or the same bytes, has
not changed, whoever could have assigned it.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvd_keras.auto import worker
from hvd_keras.auto.places import Value
from hvd_keras.ops.validate import raw

_sent: dict[int, Any] = {}  # by variable: the value that the others have
_over: list[tuple[int, Value]] = []  # variables that are gone here, but not there


def kept(pairs: Iterable[tuple[Any, Value]]) -> Callable[[], None]:
    """Return what sends the values of variables if the others lack any of them.

    ``pairs``: handles of variables, and values of their dtypes and shapes.
    """
    found = list({handle._id: (handle, x) for handle, x in pairs}.values())
    if not found:
        return lambda: None
    none = [tf.zeros([x.rank, 0], x.dtype) for _, x in found]
    call = {"tensor_name": worker.next_name(), "process_set": 0, "root_rank": 0}

    def compare(sent: list[Any]) -> Any:
        now = [tf.raw_ops.ReadVariableOp(resource=h, dtype=x.dtype) for h, x in found]
        return raw.hvd_are_same(now, sent), now

    def send(now: list[Any]) -> Any:
        return raw.hvd_broadcast(now, **call)

    with tf.Graph().as_default() as theirs:
        got = send([tf.zeros(x.shape, x.dtype) for _, x in found])
        for (handle, x), value in zip(found, got, strict=True):
            tf.raw_ops.AssignVariableOp(resource=_there(handle._id, x), value=value)
        while _over:
            gone = _there(*_over.pop())
            tf.raw_ops.DestroyResourceOp(resource=gone, ignore_lookup_error=True)
    specs = [tf.TensorSpec(None, x.dtype) for _, x in found]
    comparing, sending = (
        tf.function(f, autograph=False).get_concrete_function(specs) for f in (compare, send)
    )
    share = worker.share(sending, theirs)

    def update() -> None:
        sent = [_sent.get(h._id, x) for (h, _), x in zip(found, none, strict=True)]
        same, now = comparing(*sent)
        if all(same.numpy()):
            return
        share(now)
        for (handle, x), value in zip(found, now, strict=True):
            if handle._id not in _sent:
                weakref.finalize(handle, _end, handle._id, x)
            _sent[handle._id] = value

    return update


def forget(handles: list[Any]) -> None:
    """Hold nothing of variables that will change: who assigns them need not move them."""
    for handle in handles:
        if handle._id in _sent:
            _sent[handle._id] = tf.zeros([0, 0], _sent[handle._id].dtype)


def read(handle: Any, value: Value) -> Any:
    """Read what this rank keeps of a variable of the first one."""
    return tf.raw_ops.ReadVariableOp(resource=_there(handle._id, value), dtype=value.dtype)


def _there(number: int, value: Value) -> Any:
    name = f"auto.{number}"
    return tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)


def _end(number: int, value: Value) -> None:
    del _sent[number]
    _over.append((number, value))
