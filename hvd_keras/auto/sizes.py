"""Evaluates what a step computes from shapes, with the number of rows as a symbol.

Infers shapes again with these numbers: a step's gradients often lack them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.auto.places import FULL, Dim, Dims, Node, Rows, UnknownError, Value, unknown


def shape_of(value: Value) -> list[Any]:
    """The shape of a value, with ``Dim`` for its rows; None where it is not known."""
    dims: list[Any] = value.shape.as_list()
    if isinstance(value.place, Rows):
        dims[value.place.axis] = Dim(value.place.m)
    return dims


def ints(value: Value) -> list[Any] | None:
    """The known numbers of a value, as a list."""
    return None if value.sym is None else list(value.sym.ravel())


def fixed(value: Value) -> list[int] | None:
    """The known numbers of a value, if none depends on the batch."""
    return None if value.sym is None or value.is_size else list(map(int, value.sym.ravel()))


def numbers(value: Value) -> list[Any]:
    """The same as ``ints``, but raise UnknownError if they are not known."""
    found = ints(value)
    return unknown() if found is None else found


def sizes_of(value: Value) -> Dims:
    """A need of a value's numbers, which must be known."""
    return Dims(tuple(numbers(value)), scalar=value.shape.rank == 0)


def known(value: Value) -> list[int]:
    """The same as ``fixed``, but raise UnknownError."""
    found = fixed(value)
    return unknown() if found is None else found


def rows(value: Value) -> Rows:
    """Return where the rows of a value are; raise UnknownError if it has none."""
    return value.place if isinstance(value.place, Rows) else unknown()


def only(found: Iterable[Any]) -> Any:
    """Return what all of some are; raise UnknownError if they differ, or there is none."""
    some = set(found)
    return some.pop() if len(some) == 1 else unknown()


def _strided(node: Node, x: Any, begin: Any, end: Any, stride: Any) -> Any:
    masks = [
        node.attr(f"{m}_mask") for m in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    ]
    if x.ndim != 1 or len(begin) != 1 or masks[2] or masks[3]:
        raise UnknownError
    b, e, s = int(begin[0]), int(end[0]), int(stride[0])
    if masks[4]:
        return x[b]
    return x[None if masks[0] else b : None if masks[1] else e : s]


def _broadcast_args(node: Node, a: Any, b: Any) -> list[Any]:
    n = max(len(a), len(b))
    a, b = ([1] * (n - len(x)) + list(x) for x in (a, b))
    return [np.array([i for i in range(n) if p[i] == 1], object) for p, q in ((a, b), (b, a))]


def _stitch(node: Node, *args: Any) -> Any:
    half = len(args) // 2
    found: dict[int, Any] = {}
    for index, data in zip(args[:half], args[half:], strict=True):
        found.update({int(i): d for i, d in zip(index.ravel(), data.ravel(), strict=True)})
    return [found[i] for i in range(len(found))]


def _max(node: Node, a: Any, b: Any) -> Any:
    def one(p: Any, q: Any) -> Any:
        if isinstance(p, Dim) or isinstance(q, Dim):
            p, q = (p, q) if isinstance(p, Dim) else (q, p)
            return p if not isinstance(q, Dim) and q <= 1 else unknown()
        return max(p, q)

    return np.frompyfunc(one, 2, 1)(a, b)


def _concat_offset(node: Node, axis: Any, *shapes: Any) -> list[Any]:
    found, total = [], 0
    for shape in shapes:
        offset = [0] * len(shape)
        offset[int(axis)] = total
        total += shape[int(axis)]
        found.append(np.array(offset, object))
    return found


def _line(x: Any) -> Any:
    """Return an array, which must have one axis."""
    return x if x.ndim == 1 else unknown()


_EVAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Identity", "StopGradient", "Cast"), lambda node, x: x),
    "StridedSlice": _strided,
    "Slice": lambda node, x, b, n: x[
        tuple(slice(i, None if k == -1 else i + k) for i, k in np.stack([b, n], 1).astype(int))
    ],
    "Transpose": lambda node, x, order: x.transpose(order.astype(int)),
    "Pack": lambda node, *xs: np.stack(xs, node.attr("axis")),
    "ConcatV2": lambda node, *xs: np.concatenate(xs[:-1], int(xs[-1])),
    "Prod": lambda node, x, axes: (
        unknown() if node.attr("keep_dims") else np.multiply.reduce(_line(x), initial=1)
    ),
    "Mul": lambda node, a, b: a * b,
    "AddV2": lambda node, a, b: a + b,
    "Sub": lambda node, a, b: a - b,
    "FloorDiv": lambda node, a, b: a // b,
    "FloorMod": lambda node, a, b: a % b,
    "Maximum": _max,
    "Range": lambda node, a, b, c: np.arange(int(a), int(b), int(c)).astype(object),
    "GatherV2": lambda node, x, i, *_: _line(x)[i.astype(int)],
    "ExpandDims": lambda node, x, axis: x.reshape(1) if x.ndim == 0 else unknown(),
    "Squeeze": lambda node, x: x.reshape([]) if x.ndim == 1 else unknown(),
    "Reshape": lambda node, x, shape: x.reshape([int(n) for n in shape]),
    "Fill": lambda node, shape, x: np.full([int(n) for n in shape], x, object),
    "BroadcastGradientArgs": _broadcast_args,
    "DynamicStitch": _stitch,
    "ConcatOffset": _concat_offset,
    "InvertPermutation": lambda node, x: np.argsort(x.astype(int)),
}


def evaluate(node: Node) -> None:
    """Set ``sym`` of a node's outputs, where they are known."""
    out = node.outputs[0] if node.outputs else None
    if out is None or out.dtype not in (tf.int32, tf.int64):
        return
    try:
        if node.type == "Const":
            value = tf.make_ndarray(node.attr("value"))
            found: Any = value.astype(object) if value.size <= 64 else unknown()
        elif node.type in ("Shape", "Size", "Rank", "ShapeN"):
            found = [shape_of(x) for x in node.inputs]
            if any(None in dims for dims in found):
                return
            if node.type == "Size":
                found = np.multiply.reduce(np.array(found[0], object)) if found[0] else 1
            elif node.type == "Rank":
                found = len(found[0])
            elif node.type == "Shape":
                found = found[0]
        elif node.type in _EVAL:
            args = [x.sym for x in node.inputs]
            if any(x is None for x in args) or any(x.place != FULL for x in node.inputs):
                return
            found = _EVAL[node.type](node, *args)
        else:
            return
    except (UnknownError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return
    many = len(node.outputs) > 1
    for value, one in zip(node.outputs, found if many else [found], strict=True):
        value.sym = np.array(one, object)


class Shapes:
    """A graph that never runs, whose ops are those of the step."""

    def __init__(self) -> None:
        self._graph = tf.Graph()
        self._have: dict[int, Any] = {}

    def add(self, value: Value) -> None:
        """Take the shape of a value as it is."""
        with self._graph.as_default():
            self._have[id(value)] = tf.compat.v1.placeholder(value.dtype, value.shape)

    def infer(self, node: Node, inputs: list[Value]) -> None:
        """Set the shapes of a node's outputs."""
        if node.calls:
            tensors = [None] * len(node.outputs)
        elif node.outputs and all(v.sym is not None for v in node.outputs):
            tensors = [self._sizes(v) for v in node.outputs]
        else:
            tensors = node.copied(self._graph, [self._have[id(x)] for x in inputs])
        for value, tensor in zip(node.outputs, tensors, strict=True):
            if tensor is None:
                self.add(value)
                continue
            tensor.set_shape(value.shape)
            value.shape = tensor.shape
            self._have[id(value)] = tensor

    def _sizes(self, value: Value) -> Any:
        with self._graph.as_default():
            assert value.sym is not None
            parts = [
                tf.compat.v1.placeholder(value.dtype, [])
                if isinstance(n, Dim)
                else tf.constant(n, value.dtype)
                for n in value.sym.ravel()
            ]
            if value.sym.ndim == 0:
                return parts[0]
            flat = tf.stack(parts) if parts else tf.zeros([0], value.dtype)
            return flat if value.sym.ndim == 1 else tf.reshape(flat, value.sym.shape)
