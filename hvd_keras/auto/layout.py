"""Rules of ops that move numbers without computing: reshape, transpose, slice, gather, pad..."""

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hvd_keras.auto.places import ALL, FULL, SUM, Dim, Dims, Node, Rows, UnknownError
from hvd_keras.auto.rules import AFTER_LINEAR, Plan, all_of, axes_of, has_partial, rows_of, rule
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


@rule("Squeeze", table=AFTER_LINEAR)
def _squeeze(node: Node) -> Plan:
    (x,) = node.inputs
    axes, at = [a % x.rank for a in node.attr("squeeze_dims")], rows(x).axis
    if not axes or at in axes:
        return None
    return [x.place], [Rows(at - sum(a < at for a in axes), x.place.m)]


@rule("ExpandDims", table=AFTER_LINEAR)
def _expand(node: Node) -> Plan:
    x = node.inputs[0]
    at, axis = known(node.inputs[1])[0] % (x.rank + 1), rows(x).axis
    return [x.place, all_of(node.inputs[1])], [Rows(axis + (at <= axis), x.place.m)]


@rule("Transpose", table=AFTER_LINEAR)
def _transpose(node: Node) -> Plan:
    x, order = node.inputs
    place, axes = rows(x), known(order)
    return [place, Dims(tuple(axes))], [Rows(axes.index(place.axis), place.m)]


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


@rule("Unpack")
def _unpack(node: Node) -> Plan:
    (x,) = node.inputs
    at, axis = node.attr("axis") % x.rank, rows(x).axis
    if axis == at:
        return None
    return [x.place], [Rows(axis - (at < axis), x.place.m)] * len(node.outputs)


@rule("Split", "SplitV")
def _split(node: Node) -> Plan:
    data = node.inputs[1 if node.type == "Split" else 0]
    axis = node.inputs[0 if node.type == "Split" else 2]
    if rows(data).axis in axes_of(axis, data.rank):
        return None
    needs = [x.place if x is data else all_of(x) for x in node.inputs]
    return needs, [data.place] * len(node.outputs)


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


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(node: Node) -> Plan:
    x, amounts, *more = node.inputs
    at = 2 * rows(x).axis
    if any(known(amounts)[at : at + 2]):
        return None
    return [x.place, ALL, *[ALL] * len(more)], [x.place]


@rule("Tile")
def _tile(node: Node) -> Plan:
    x, counts = node.inputs
    times = known(counts)
    return ([x.place, Dims(tuple(times))], [x.place]) if times[rows(x).axis] == 1 else None


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


@rule("OneHot")
def _one_hot(node: Node) -> Plan:
    x = node.inputs[0]
    at, axis = node.attr("axis") % (x.rank + 1), rows(x).axis
    return [x.place, ALL, ALL, ALL], [Rows(axis + (at <= axis), x.place.m)]


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


@rule("MatrixBandPart", "MatrixDiagPartV3", "MatrixDiagV3", "MatrixInverse", "Cholesky")
def _batched_matrices(node: Node) -> Plan:
    x, *more = node.inputs
    return ([x.place, *[ALL] * len(more)], [x.place]) if rows(x).axis < x.rank - 2 else None
