"""Rules of ops that move numbers without computing: reshape, transpose, slice, gather, pad..."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hvd_keras.auto.places import ALL, FULL, SUM, Dim, Dims, Node, Rows, UnknownError, Value
from hvd_keras.auto.rules import (
    AFTER_LINEAR,
    RULES,
    Plan,
    all_of,
    axes_of,
    has_partial,
    rows_of,
    rule,
)
from hvd_keras.auto.sizes import known, numbers, only, rows, shape_of

_MANY = 1 << 30  # rows


def reshaped(dims: list[Any], target: list[Any], place: Rows) -> tuple[Rows, list[Any]]:
    """Where the rows are after a reshape, and its complete shape."""
    axis, m = place.axis, place.m
    if any(n is None for n in dims):
        raise UnknownError
    inner, outer = math.prod(dims[axis + 1 :]), math.prod(dims[:axis])
    if -1 in target:
        rest = Dim(m * inner * outer) // math.prod(n for n in target if n != -1)
        target = [rest if n == -1 else n for n in target]
    for at, n in enumerate(target):
        if isinstance(n, Dim):
            if any(isinstance(k, Dim) for k in target[at + 1 :]) or n.k != 1:
                raise UnknownError
            if math.prod(target[:at]) != outer or n.c * math.prod(target[at + 1 :]) != m * inner:
                raise UnknownError
            return Rows(at, n.c), target
    raise UnknownError


@rule("Reshape", table=AFTER_LINEAR)
def _reshape(node: Node) -> Plan:
    x, shape = node.inputs
    place, target = reshaped(shape_of(x), numbers(shape), rows(x))
    return [x.place, Dims(tuple(target))], [place]


def _without(axes: Sequence[int], at: int) -> int | None:
    """Return where an axis is once others are gone; None if it is among them."""
    return None if at in axes else at - sum(axis < at for axis in axes)


# Of ops that move the rows of one input, ``x``: where their axis ``at`` goes; None: they meet.
_AFTER: dict[str, Callable[[Node, Value, int], int | None]] = {
    "Transpose": lambda node, x, at: known(node.inputs[1]).index(at),
    "ExpandDims": lambda node, x, at: at + (known(node.inputs[1])[0] % (x.rank + 1) <= at),
    "OneHot": lambda node, x, at: at + (node.attr("axis") % (x.rank + 1) <= at),
    "Squeeze": lambda node, x, at: _without(
        [axis % x.rank for axis in node.attr("squeeze_dims")] or [at], at
    ),
    "Unpack": lambda node, x, at: _without([node.attr("axis") % x.rank], at),
    "EnsureShape": lambda node, x, at: (
        at if [dim.size for dim in node.attr("shape").dim][at : at + 1] == [-1] else None
    ),
    "Tile": lambda node, x, at: at if known(node.inputs[1])[at] == 1 else None,
    "Split": lambda node, x, at: None if at in axes_of(node.inputs[0], x.rank) else at,
    "SplitV": lambda node, x, at: None if at in axes_of(node.inputs[2], x.rank) else at,
    **dict.fromkeys(
        ("Cumsum", "Cumprod", "ReverseV2"),
        lambda node, x, at: None if at in axes_of(node.inputs[1], x.rank) else at,
    ),
    **dict.fromkeys(
        ("ArgMax", "ArgMin"),
        lambda node, x, at: _without(axes_of(node.inputs[1], x.rank), at),
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax"), lambda node, x, at: at if at < x.rank - 1 else None),
    **dict.fromkeys(
        ("MatrixBandPart", "MatrixDiagPartV3", "MatrixDiagV3", "MatrixInverse", "Cholesky"),
        lambda node, x, at: at if at < x.rank - 2 else None,
    ),
    **dict.fromkeys(
        ("Pad", "PadV2", "MirrorPad", "MirrorPadGrad"),
        lambda node, x, at: None if any(known(node.inputs[1])[2 * at : 2 * at + 2]) else at,
    ),
}


def _move(node: Node) -> Plan:
    data = only(x for x in node.inputs if x.place != FULL)
    place = rows(data)
    after = _AFTER[node.type](node, data, place.axis)
    needs = [place if x is data else all_of(x) for x in node.inputs]
    return None if after is None else (needs, [Rows(after, place.m)] * len(node.outputs))


for _name in _AFTER:
    (AFTER_LINEAR if _name in RULES else RULES)[_name] = _move


@rule("ConcatV2")
def _concat(node: Node) -> Plan:
    *parts, axis = node.inputs
    (at,) = axes_of(axis, parts[0].rank)
    return _together(node, parts, at, [all_of(axis)], 0)


@rule("Pack")
def _pack(node: Node) -> Plan:
    at = node.attr("axis") % (node.inputs[0].rank + 1)
    return _together(node, node.inputs, at, [], 1)


def _together(node: Node, parts: list[Any], at: int, more: list[Any], new: int) -> Plan:
    if parts and all(x.place == SUM for x in parts):
        return [SUM] * len(parts) + more, [SUM]
    place = only(rows_of(node))
    if has_partial(node) or (not new and at == place.axis):
        return None
    if any(x.place == FULL and x.shape[place.axis] is not None for x in parts):
        return None
    return [place] * len(parts) + more, [Rows(place.axis + (new and at <= place.axis), place.m)]


@rule("StridedSlice", "StridedSliceGrad")
def _strided(node: Node) -> Plan:
    backwards = node.type == "StridedSliceGrad"
    kinds = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    first, last, dots, new, one = (node.attr(f"{kind}_mask") for kind in kinds)
    data = node.inputs[-1 if backwards else 0]
    begin, end, stride = (numbers(x) for x in node.inputs[1:4])
    full, place = numbers(node.inputs[0]) if backwards else shape_of(data), rows(data)
    axis = full.index(Dim(place.m)) if backwards else place.axis
    others = [*begin, *stride, *end[:axis], *end[axis + 1 :]]
    if any(isinstance(n, Dim) for n in others):
        return None  # the number of rows as a place in another axis
    if any(isinstance(n, Dim) and (dots or new or n != full[axis]) for n in end):
        return None

    def of(i: int) -> Any:
        bit = 1 << i
        if bit & (dots | new | one):
            return ... if bit & dots else None if bit & new else begin[i]
        is_open = bit & last or isinstance(end[i], Dim)
        return slice(None if bit & first else begin[i], None if is_open else end[i], stride[i])

    # NumPy says where the rows go: the axis with a stride of 1, if all of them.
    lengths = [_MANY if isinstance(n, Dim) else n for n in full]
    strides = [int(i == axis) for i in range(len(full))]
    probe = as_strided(np.zeros(1), lengths, strides)[tuple(of(i) for i in range(len(begin)))]
    after = probe.strides.index(1)
    if probe.shape[after] != _MANY or (backwards and after != place.axis):
        return None
    sizes = [Dims(tuple(begin)), Dims(tuple(end)), Dims(tuple(stride))]
    if backwards:
        return [Dims(tuple(full)), *sizes, place], [Rows(axis, place.m)]
    return [place, *sizes], [Rows(after, place.m)]


@rule("Slice")
def _slice(node: Node) -> Plan:
    x, begin, size = node.inputs
    b, s, axis = numbers(begin), numbers(size), rows(x).axis
    others = [n for i, pair in enumerate(zip(b, s, strict=True)) if i != axis for n in pair]
    if b[axis] != 0 or s[axis] not in (-1, Dim(x.place.m)) or Dim in map(type, others):
        return None
    return [x.place, Dims(tuple(b)), Dims(tuple(s))], [x.place]


@rule("BroadcastTo")
def _broadcast_to(node: Node) -> Plan:
    x, shape = node.inputs
    target, place = numbers(shape), rows(x)
    axis = len(target) - x.rank + place.axis
    others = target[:axis] + target[axis + 1 :]
    if target[axis] != Dim(place.m) or any(isinstance(n, Dim) for n in others):
        return None
    return [place, Dims(tuple(target))], [Rows(axis, place.m)]


@rule("GatherV2")
def _gather(node: Node) -> Plan:
    params, indices, axis = node.inputs
    (at,), batch = axes_of(axis, params.rank), node.attr("batch_dims")
    batch += indices.rank if batch < 0 else 0
    need = all_of(axis)
    if isinstance(params.place, Rows) and isinstance(indices.place, Rows):
        if params.place != indices.place or params.place.axis >= batch:
            return None
        return [params.place, indices.place, need], [params.place]
    if isinstance(indices.place, Rows) and params.place == FULL:
        if batch:
            return None
        return [ALL, indices.place, need], [Rows(at + indices.place.axis, indices.place.m)]
    if isinstance(params.place, Rows) and indices.place == FULL:
        if batch or params.place.axis == at:
            return None
        axis_after = params.place.axis + (indices.rank - 1 if at < params.place.axis else 0)
        return [params.place, ALL, need], [Rows(axis_after, params.place.m)]
    return None


@rule("UnsortedSegmentSum", "ScatterNd")
def _segment_sum(node: Node) -> Plan:
    by_place = node.type == "ScatterNd"
    *inputs, count = node.inputs
    ids = inputs[0] if by_place else inputs[1]
    place, need = only(rows_of(node)), Dims(tuple(known(count)), scalar=not by_place)
    axes = ids.rank - by_place
    if not by_place and ids.place == FULL and place.axis >= axes:
        return [place, ALL, need], [Rows(place.axis - axes + 1, place.m)]
    fixed = any(x.place == FULL and x.shape[place.axis] is not None for x in inputs)
    if has_partial(node) or place.axis >= axes or fixed:
        return None
    return [place, place, need], [SUM]
