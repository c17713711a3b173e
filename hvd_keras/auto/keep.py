"""Variables that a function only reads: the other ranks have got their values, and keep them.

They get them again once they have changed. The first rank holds what it has sent, and a variable
whose memory is held moves when it is assigned. So one with the same memory, or the same bytes, has
not changed, whoever could have assigned it.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvd_keras.auto import worker
from hvd_keras.auto.places import Value
from hvd_keras.ops.validate import raw

_sent: dict[int, Any] = {}  # by variable: the value that the others have
_over: list[tuple[int, Value]] = []  # variables that are gone here, but not there


class Kept:
    """What one function reads."""

    def __init__(self, pairs: Iterable[tuple[Any, Value]]) -> None:
        """``pairs``: handles of variables, and values of their dtypes and shapes."""
        self._pairs = list({handle._id: (handle, x) for handle, x in pairs}.values())
        self._none = [tf.zeros([x.rank, 0], x.dtype) for _, x in self._pairs]
        call = {"tensor_name": worker.next_name(), "process_set": 0, "root_rank": 0}

        def compare(sent: list[Any]) -> Any:
            now = [tf.raw_ops.ReadVariableOp(resource=h, dtype=x.dtype) for h, x in self._pairs]
            return raw.hvd_are_same(now, sent), now

        def send(now: list[Any]) -> Any:
            return raw.hvd_broadcast(now, **call)

        if not self._pairs:
            return
        with tf.Graph().as_default() as theirs:
            got = send([tf.zeros(x.shape, x.dtype) for _, x in self._pairs])
            there = [_there(handle._id, x) for handle, x in self._pairs]
            for one, value in zip(there, got, strict=True):
                tf.raw_ops.AssignVariableOp(resource=one, value=value)
            while _over:
                gone = _there(*_over.pop())
                tf.raw_ops.DestroyResourceOp(resource=gone, ignore_lookup_error=True)
        specs = [tf.TensorSpec(None, x.dtype) for _, x in self._pairs]
        self._compare, sending = (
            tf.function(f, autograph=False).get_concrete_function(specs) for f in (compare, send)
        )
        self._send = worker.share(sending, theirs)

    def update(self) -> None:
        """Send all values if the others lack any of them."""
        if not self._pairs:
            return
        sent = [_sent.get(h._id, x) for (h, _), x in zip(self._pairs, self._none, strict=True)]
        same, now = self._compare(*sent)
        if all(same.numpy()):
            return
        self._send(now)
        for (handle, x), value in zip(self._pairs, now, strict=True):
            if handle._id not in _sent:
                weakref.finalize(handle, _end, handle._id, x)
            _sent[handle._id] = value


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
