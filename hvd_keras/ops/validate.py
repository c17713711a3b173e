"""Checks that all collectives make of their arguments, and the names of their requests."""

import weakref
from typing import Any

import tensorflow as tf

from hvd_keras import _library, xla
from hvd_keras.process_sets import ProcessSet

raw = _library.tensorflow_ops()

DTYPES = {
    tf.bool,
    tf.uint8,
    tf.int8,
    tf.uint16,
    tf.int16,
    tf.uint32,
    tf.int32,
    tf.uint64,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
}


def check(kind: str, process_set: ProcessSet) -> None:
    """Raises ValueError or NotImplementedError if this rank cannot make this call here."""
    process_set.check_included(kind)
    xla.check(kind)


def checked(kind: str, tensor: Any, process_set: ProcessSet) -> Any:
    """Returns a tensor, or ``tf.IndexedSlices``, that this rank may send in this process set."""
    check(kind, process_set)
    if not isinstance(tensor, tf.IndexedSlices):
        tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype not in DTYPES:
        names = ", ".join(sorted(dtype.name for dtype in DTYPES))
        raise TypeError(
            f"hvd.{kind}: got a tensor of dtype {tensor.dtype.name}, expected one of {names}. "
            "Encode it as one of these first."
        )
    return tensor


def with_rows(kind: str, tensor: Any, process_set: ProcessSet) -> tf.Tensor:
    """As ``checked``, for collectives that need a first dimension."""
    tensor = tf.convert_to_tensor(checked(kind, tensor, process_set))
    if tensor.shape.rank == 0:
        raise ValueError(
            f"hvd.{kind}: got a scalar, expected a tensor with at least one dimension. "
            "Use tf.expand_dims(tensor, 0)."
        )
    return tensor


_unnamed: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], int]] = weakref.WeakKeyDictionary()


def name(kind: str, given: str | None, process_set: ProcessSet) -> str:
    """Returns the name of a request: the given one, or one that all ranks derive alike.

    An unnamed call in a function is numbered among the calls there of its kind and process set,
    since a rank makes only the calls of the sets that include it. TensorFlow's op names do not
    serve: they differ between ranks as soon as one rank has traced more.
    """
    if given is not None:
        return given
    if tf.executing_eagerly():
        return "unnamed"
    graph = tf.compat.v1.get_default_graph()
    if xla.is_compiling():
        # A call in a loop or branch may run before or after one outside, so they need different
        # names.
        graph = xla.function_of(graph)
    counts = _unnamed.setdefault(graph, {})
    key = kind, process_set.id()
    counts[key] = counts.get(key, -1) + 1
    return f"unnamed.{counts[key]}"
