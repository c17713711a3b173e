"""Compares a step that is divided with the same step on the first rank alone."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from hvd_keras.auto import messages

# Beginnings of the names of ops with a state that variables hold, or that a step only reads.
_OF_VARIABLES = (
    *("ReadVariable", "Assign", "Resource", "VarIsInitialized", "Rng", "Stateful"),
    *("LookupTableFind", "LookupTableSize", "Assert", "If", "While", "Case"),
)
# What sums in another order may differ by: outputs, and changes of variables.
_OUTPUTS, _CHANGES = 0.01, 0.1
_HALF = 8  # times as much, in half precision
_TINY = 1e-5
_ON_GPU = 1 << 30  # bytes of variables, of which there may be three copies for a moment


def hidden(graph: Any) -> str:
    """Return an op of a function whose effect is no change of variables; "" if there is none."""
    definition = graph.as_graph_def()
    functions = [of.node_def for of in definition.library.function]
    for node in (node for nodes in (definition.node, *functions) for node in nodes):
        op = op_def_registry.get(node.op)
        if op is not None and op.is_stateful and not node.op.startswith(_OF_VARIABLES):
            return str(node.op)
    return ""


def compared(
    whole: Callable[[], Any], divided: Callable[[], Any], handles: Sequence[Any]
) -> tuple[str, Any]:
    """Take one step in two ways, each from the same values of variables.

    Args:
        handles: what the functions capture.

    Returns:
        How the second way differs, or ""; and the outputs of the way whose values stay.
    """
    variables = list({handle._id: handle for handle in handles if _dtype(handle)}.values())
    size = sum(_bytes(handle) for handle in variables)
    if size > _memory():
        return f"its variables have {size >> 20} MiB, too many to compare two steps", whole()
    before = _read(variables)
    expected = whole()
    after = _read(variables)
    _assign(variables, before)
    try:
        outputs = divided()
    except messages.LEFT:
        raise
    except BaseException as error:
        _assign(variables, after)
        if not isinstance(error, Exception):
            raise
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}", expected
    why = _difference(expected, outputs) or _drift(before, after, _read(variables))
    if why:
        _assign(variables, after)
    return why, expected if why else outputs


def _dtype(handle: Any) -> Any:
    """Return the dtype of a variable; None of another resource, and of a tensor."""
    if handle.dtype != tf.resource:
        return None
    known = handle._handle_data
    return tf.as_dtype(known.shape_and_type[0].dtype) if known and known.is_set else None


def _bytes(handle: Any) -> int:
    count = tf.TensorShape(handle._handle_data.shape_and_type[0].shape).num_elements() or 0
    return int(count * _dtype(handle).size)


def _memory() -> int:
    """Return how many bytes of variables may be copied."""
    if tf.config.list_logical_devices("GPU"):
        return _ON_GPU
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3


def _read(variables: Sequence[Any]) -> list[Any]:
    return [tf.raw_ops.ReadVariableOp(resource=v, dtype=_dtype(v)) for v in variables]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=variable, value=value)


def _difference(expected: Any, outputs: Any) -> str:
    """Return how outputs differ by more than rounding."""
    pairs = [tf.nest.flatten(one, expand_composites=True) for one in (expected, outputs)]
    if len(pairs[0]) != len(pairs[1]):
        return f"{len(pairs[1])} outputs instead of {len(pairs[0])}"
    for number, (one, other) in enumerate(zip(*pairs, strict=True)):
        if not isinstance(one, tf.Tensor) or not isinstance(other, tf.Tensor):
            if one is not other:
                return f"output {number} is {other!r} instead of {one!r}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"output {number} is {other.shape} instead of {one.shape}"
        elif not _close(one, other):
            return f"output {number} is {_shown(other)} instead of {_shown(one)}"
    return ""


def _close(one: Any, other: Any) -> bool:
    a, b = one.numpy(), other.numpy()
    if not one.dtype.is_floating:
        return bool(np.mean(a != b) <= _OUTPUTS)  # classes may be equal to rounding
    a, b = (np.asarray(x, "float64") for x in (a, b))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return False
    a, b = (np.nan_to_num(x) for x in (a, b))
    most = _OUTPUTS * (_HALF if one.dtype.size < 4 else 1)
    return bool(np.abs(a - b).max(initial=0) <= most * np.abs(a).max(initial=0) + _TINY)


def _shown(tensor: Any) -> str:
    return " ".join(np.array2string(tensor.numpy(), precision=4, threshold=6, edgeitems=2).split())


def _drift(before: Sequence[Any], after: Sequence[Any], found: Sequence[Any]) -> str:
    """Return by how much changes of variables differ; "" if that is rounding.

    A few elements may differ much: what Adam makes of a gradient that is zero but for rounding.
    """
    wrong = changed = 0.0
    for old, one, other in zip(before, after, found, strict=True):
        if not one.dtype.is_floating:
            if one.dtype != tf.resource and not bool(tf.reduce_all(tf.equal(one, other))):
                return f"a variable is {_shown(other)} instead of {_shown(one)}"
            continue
        old, one, other = (tf.cast(x, tf.float32) for x in (old, one, other))
        moved, apart = float(tf.norm(one - old)), float(tf.norm(other - one))
        if moved == apart == 0.0 or not np.isfinite(moved):
            continue
        count = float(one.shape.num_elements() or 1)
        noise = _TINY * float(tf.norm(one))
        changed += count
        wrong += count * min(1.0, apart / (moved + noise))
    if wrong > _CHANGES * changed:
        return f"variables change by other values, by {wrong / changed:.0%}"
    return ""
