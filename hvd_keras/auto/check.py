"""Compares a step that is divided with the same step on the first rank alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from hvd_keras.auto import messages

# Beginnings of the names of ops with a state that variables hold, or that a step only reads.
_OF_VARIABLES = (
    *("ReadVariable", "Assign", "Resource", "VarIsInitialized", "Rng", "Stateful"),
    *("LookupTableFind", "LookupTableSize", "Assert", "If", "While", "Case", "CudnnRNN"),
)
# What sums in another order may differ by: outputs, and changes of each variable.
_OUTPUTS, _CHANGES = 0.01, 0.01
_HALF = 8  # times as much, in half precision
_TINY, _TRIALS = 1e-5, 3
# Of several operations, relative to numbers; other types are as float32.
_ROUNDING = 1e-6
_ROUNDINGS = {tf.float16.as_datatype_enum: 2**-8, tf.bfloat16.as_datatype_enum: 2**-6}


def hidden(nodes: Sequence[Any]) -> str:
    """Return an op of a function whose effect is no change of variables; "" if there is none."""
    for node in nodes:
        op = op_def_registry.get(node.op)
        if op and op.is_stateful and not node.op.startswith(_OF_VARIABLES):
            return str(node.op)
    return ""


def draws(nodes: Sequence[Any]) -> bool:
    """Whether a function draws random numbers."""
    return any("Random" in node.op for node in nodes)


def rounding_of(nodes: Sequence[Any]) -> float:
    """Return by how much, relative to numbers, a function rounds what it computes."""
    types = {value.type for node in nodes for value in node.attr.values()}
    return max([_ROUNDING, *(_ROUNDINGS[one] for one in types & _ROUNDINGS.keys())])


def assigned(*functions: Any) -> list[Any]:
    """Return the handles of variables that concrete functions may change."""
    found = {}
    for function in functions:
        inner = function.graph.inputs[len(function.graph.inputs) - len(function.captured_inputs) :]
        for handle, tensor in zip(function.captured_inputs, inner, strict=True):
            users = {op.type for op in tensor.consumers()} - {"ReadVariableOp", "ResourceGather"}
            if users and _dtype(handle):
                found[handle._id] = handle
    return list(found.values())


def fits(variables: Sequence[Any]) -> bool:
    """Whether the memory of this host has room for two copies of variables."""
    with open("/proc/meminfo") as file:
        known = dict(line.split(":") for line in file)
    available = int(known["MemAvailable"].split()[0]) << 10
    return sum(map(_bytes, variables)) < available // 3


def compared(
    whole: Callable[[], Any],
    divided: Callable[[], Any],
    variables: Sequence[Any],
    rounding: float = _ROUNDING,
) -> tuple[str, Any]:
    """Take one step in two ways, each from the same values of variables.

    Args:
        variables: the handles of those that may change.
        rounding: what ``rounding_of`` returns for it.

    Returns:
        How the second way differs, or ""; and the outputs of the way whose values stay.
    """
    before = _read(variables)
    expected = whole()
    after = _read(variables)
    _assign(variables, before)
    why = "it was interrupted"
    try:
        outputs = divided()
        why = _difference(expected, outputs, rounding)
        why = why or _wrong(whole, variables, before, after, rounding)
    except messages.LEFT:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    finally:
        if why:
            _assign(variables, after)
    return why, expected if why else outputs


def _wrong(
    whole: Callable[[], Any],
    variables: Sequence[Any],
    before: Sequence[Any],
    after: Sequence[Any],
    rounding: float,
) -> str:
    """Return which variable has another value than ``after``, by more than rounding; "" if none."""
    found = _read(variables)
    doubtful = _drift(before, after, found)
    if not doubtful:
        return ""
    # Rounding alone may do as much: to what Adam makes of a gradient that is zero.
    random, noise = np.random.default_rng(1), dict[int, float]()
    for _ in range(_TRIALS):
        others = [_beside(value, rounding, random) for value in before]
        _assign(variables, others)
        whole()
        for i, apart in _drift(before, after, _read(variables), others).items():
            noise[i] = max(apart, noise.get(i, 0.0))
    _assign(variables, found)
    for i, apart in doubtful.items():
        if noise.get(i, 0.0) < apart / 4:
            return f"a variable is {_shown(found[i])} instead of {_shown(after[i])}"
    return ""


def _beside(value: Any, rounding: float, random: Any) -> Any:
    """Return numbers that differ by rounding."""
    if not value.dtype.is_floating:
        return value
    return value * tf.cast(1 + rounding * random.uniform(-1, 1, value.shape), value.dtype)


def _dtype(handle: Any) -> Any:
    """Return the dtype of a variable; None of another resource, and of a tensor."""
    if handle.dtype != tf.resource:
        return None
    known = handle._handle_data
    return tf.as_dtype(known.shape_and_type[0].dtype) if known and known.is_set else None


def _bytes(handle: Any) -> int:
    count = tf.TensorShape(handle._handle_data.shape_and_type[0].shape).num_elements() or 0
    return int(count * _dtype(handle).size)


def _read(variables: Sequence[Any]) -> list[Any]:
    values = [tf.raw_ops.ReadVariableOp(resource=v, dtype=_dtype(v)) for v in variables]
    with tf.device("CPU:0"):  # a GPU may have no room for copies
        return [tf.identity(value) for value in values]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    with messages.uninterrupted():  # a Ctrl-C must not leave values of two steps
        for variable, value in zip(variables, values, strict=True):
            with tf.device(variable.device):
                tf.raw_ops.AssignVariableOp(resource=variable, value=tf.identity(value))


def _difference(expected: Any, outputs: Any, rounding: float) -> str:
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
        elif not _close(one, other, rounding):
            return f"output {number} is {_shown(other)} instead of {_shown(one)}"
    return ""


def _close(one: Any, other: Any, rounding: float) -> bool:
    a, b = one.numpy(), other.numpy()
    if not (one.dtype.is_floating or one.dtype.is_complex):
        return bool(np.mean(a != b) <= _OUTPUTS)  # classes may be equal to rounding
    a, b = (np.asarray(x, "complex128" if one.dtype.is_complex else "float64") for x in (a, b))
    most = _OUTPUTS * (_HALF if rounding > _ROUNDING else 1)
    most = most * np.abs(a[np.isfinite(a)]).max(initial=0) + _TINY
    return np.allclose(b, a, 0, most, equal_nan=True)


def _shown(tensor: Any) -> str:
    values = tensor.numpy()
    values = values.ravel() if values.ndim else values  # few of any shape
    return " ".join(np.array2string(values, precision=4, threshold=6, edgeitems=2).split())


def _drift(
    before: Sequence[Any], after: Sequence[Any], found: Sequence[Any], other: Sequence[Any] = ()
) -> dict[int, float]:
    """Return the indices of variables that have changed by other values, and how much they differ.

    Args:
        before, after: their values in one step.
        other, found: those in another step; by default, that begins with the same.
    """
    drift = {}
    for i, (old, one, begun, two) in enumerate(
        zip(before, after, other or before, found, strict=True)
    ):
        if one.dtype.is_floating or one.dtype.is_complex:
            wide = tf.complex64 if one.dtype.is_complex else tf.float32
            old, one, begun, two = (tf.cast(x, wide) for x in (old, one, begun, two))
            moves = one - old, two - begun
            moved, apart = (float(abs(tf.norm(x))) for x in (moves[0], moves[1] - moves[0]))
            least = _TINY * float(abs(tf.norm(one)))
            if not apart <= _CHANGES * moved + least and np.isfinite(moved):
                known = math.isfinite(apart) and moved + least
                drift[i] = apart / (moved + least) if known else math.inf
        elif not bool(tf.reduce_all(tf.equal(one, two))):
            drift[i] = 1.0
    return drift
