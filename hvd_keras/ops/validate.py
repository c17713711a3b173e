"""Checks of arguments that all collectives share, names of requests, and what XLA compiles."""

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs

from hvd_keras.runtime import agree, flight, libraries, process_sets
from hvd_keras.runtime.process_sets import ProcessSet

raw = libraries.tensorflow_ops()


def check(kind: str, process_set: ProcessSet) -> None:
    """Raise ValueError or NotImplementedError if this rank cannot make this call here."""
    process_sets.check(process_set, kind)
    why = libraries.why_no_xla()
    if why and is_compiling():
        raise NotImplementedError(
            f"XLA cannot compile hvd.{kind} here: {why}. Use jit_compile=False. In model.fit, "
            "hvd.callbacks.BroadcastGlobalVariablesCallback turns XLA off."
        )


def is_compiling() -> bool:
    """Whether XLA will compile the function that is being traced."""
    # A plain tf.function that was traced before a compiled one calls it is not traced again, so it
    # is not recognised.
    return not tf.executing_eagerly() and bool(
        control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def on_all_ranks(
    kind: str, name: str, process_set: ProcessSet, *more: Any, **call: Any
) -> contextlib.AbstractContextManager[None]:
    """``agree.refused_on_all_ranks``, in eager mode.

    While a function is traced or a graph is built, an error is only raised on this rank, because
    requests before this one have not run yet.
    """
    if tf.executing_eagerly():
        return agree.refused_on_all_ranks(kind, name, process_set, *more, **call)
    return contextlib.nullcontext()


def checked(kind: str, tensor: Any) -> Any:
    """Return a tensor, or ``tf.IndexedSlices``, of a dtype that can be sent."""
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(
            f"hvd.{kind}: got a {type(tensor).__name__}, expected a dense tensor. Send its parts, "
            "such as values and row_lengths() of a RaggedTensor, and put them together again."
        )
    if not isinstance(tensor, tf.IndexedSlices):
        tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype.name not in agree.DTYPES:
        names = ", ".join(sorted(agree.DTYPES))
        raise TypeError(
            f"hvd.{kind}: got a tensor of dtype {tensor.dtype.name}, expected one of {names}. "
            "Encode it as one of these first."
        )
    return tensor


def listed(kind: str, tensors: Any) -> list[Any]:
    """Return the tensors of a grouped call. Raises TypeError if there is no list of them."""
    if not isinstance(tensors, Iterable) or hasattr(tensors, "assign"):
        raise TypeError(
            f"hvd.grouped_{kind}: got {tensors!r:.99}, expected a list of tensors. For one use "
            f"hvd.{kind}."
        )
    return list(tensors)


def with_rows(kind: str, tensor: Any) -> tf.Tensor:
    """As ``checked``, for collectives that need a first dimension."""
    tensor = tf.convert_to_tensor(checked(kind, tensor))
    if tensor.shape.rank == 0:
        raise ValueError(
            f"hvd.{kind}: got a scalar, expected a tensor with at least one dimension. "
            "Use tf.expand_dims(tensor, 0)."
        )
    return tensor


def check_type(kind: str, argument: str, value: Any, *, right: bool, expected: str) -> None:
    """Raise TypeError unless an argument is right; positional ones may be in another order."""
    # Horovod's Keras modules, too, have functions of these names, whose arguments differ.
    if not right:
        raise TypeError(
            f"hvd.{kind}: {argument} is {value!r}, expected {expected}. The signature is "
            "horovod.tensorflow's, not that of horovod.keras and horovod.tensorflow.keras. Give "
            f"arguments by name: hvd.{kind}(x, op=hvd.Sum, name='loss')."
        )


def check_average(average: Any) -> None:
    """Raise TypeError unless Horovod's older argument is a bool or None."""
    right = average is None or isinstance(average, (bool, np.bool_))
    check_type("allreduce", "average", average, right=right, expected="True, False or None")


def check_compression(kind: str, compression: Any) -> None:
    """Raise TypeError unless it is a compressor."""
    right = hasattr(compression, "compress") and hasattr(compression, "decompress")
    expected = "hvd.Compression.none, .fp16 or .bf16, or a class derived from hvd.Compressor"
    check_type(kind, "compression", compression, right=right, expected=expected)


_unnamed: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], int]] = weakref.WeakKeyDictionary()


def name(kind: str, given: str | None, process_set: ProcessSet) -> str:
    """Return the name of a request: the given one, or one that is the same on all ranks."""
    if given is None:
        given = "unnamed" if tf.executing_eagerly() else f"unnamed.{_number(kind, process_set)}"
    check_type(kind, "name", given, right=isinstance(given, str), expected="a text")
    flight.note_call(f"{kind} '{given}'")
    return given


def _number(kind: str, process_set: ProcessSet) -> int:
    """Count the unnamed calls in a function."""
    # Per kind and process set, since a rank makes only the calls of sets that include it.
    # TensorFlow's op names are unsuitable: they differ between ranks as soon as one rank has traced
    # more.
    graph = tf.compat.v1.get_default_graph()
    if is_compiling():
        # A call in a loop or branch may run before or after one outside, so they need different
        # names: those of the function that contains the graph.
        while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
            graph = graph.outer_graph
    counts = _unnamed.setdefault(graph, {})
    key = kind, process_set.id()
    counts[key] = counts.get(key, -1) + 1
    return counts[key]
