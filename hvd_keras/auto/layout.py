"""Rules of ops that move numbers without computing: reshape, transpose, slice, gather, pad..."""

import math
from typing import Any

from hvd_keras.auto.places import ALL, FULL, SUM, Dim, Dims, Node, Rows, UnknownError
from hvd_keras.auto.rules import (
    AFTER_LINEAR,
    Plan,
    all_of,
    axes_of,
    has_partial,
    rows_of,
    rule,
)
from hvd_keras.auto.sizes import fixed, ints, shape_of


def reshaped(dims: list[Any], target: list[Any], place: Rows) -> tuple[Rows, list[Any]]:
    """Where the rows are after a reshape, and its complete shape."""
    axis, m = place.axis, place.m
    if any(n is None for n in dims):
        raise UnknownError
    inner, outer = math.prod(dims[axis + 1 :]), math.prod(dims[:axis])
    if -1 in target:
        known = 1
        for n in target:
            known = known if n == -1 else n * known
        total = Dim(m * inner * outer)
        target = [total // known if n == -1 else n for n in target]
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
    target = ints(shape)
    if target is None or not isinstance(x.place, Rows):
        return None
    place, target = reshaped(shape_of(x), target, x.place)
    return [x.place, Dims(tuple(target))], [place]


@rule("Squeeze", table=AFTER_LINEAR)
def _squeeze(node: Node) -> Plan:
    (x,) = node.inputs
    axes = [a % x.rank for a in node.attr("squeeze_dims")]
    if not axes or not isinstance(x.place, Rows) or x.place.axis in axes:
        return None
    return [x.place], [Rows(x.place.axis - sum(a < x.place.axis for a in axes), x.place.m)]


@rule("ExpandDims", table=AFTER_LINEAR)
def _expand(node: Node) -> Plan:
    x = node.inputs[0]
    found = fixed(node.inputs[1])
    if found is None or not isinstance(x.place, Rows):
        return None
    at = found[0] % (x.rank + 1)
    return [x.place, all_of(node.inputs[1])], [Rows(x.place.axis + (at <= x.place.axis), x.place.m)]


@rule("Transpose", table=AFTER_LINEAR)
def _transpose(node: Node) -> Plan:
    x, order = node.inputs
    known = fixed(order)
    if known is None or not isinstance(x.place, Rows):
        return None
    return [x.place, Dims(tuple(known))], [Rows(known.index(x.place.axis), x.place.m)]


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
    places = set(rows_of(node))
    if parts and all(x.place == SUM for x in parts):
        return [SUM] * len(parts) + more, [SUM]
    if len(places) != 1 or has_partial(node):
        return None
    (place,) = places
    if not new and at == place.axis:
        return None
    if any(x.place == FULL and x.shape[place.axis] is not None for x in parts):
        return None
    return [place] * len(parts) + more, [Rows(place.axis + (new and at <= place.axis), place.m)]


@rule("Unpack")
def _unpack(node: Node) -> Plan:
    (x,) = node.inputs
    at = node.attr("axis") % x.rank
    if not isinstance(x.place, Rows) or x.place.axis == at:
        return None
    return [x.place], [Rows(x.place.axis - (at < x.place.axis), x.place.m)] * len(node.outputs)


@rule("Split", "SplitV")
def _split(node: Node) -> Plan:
    data = node.inputs[1 if node.type == "Split" else 0]
    axis = node.inputs[0 if node.type == "Split" else 2]
    if not isinstance(data.place, Rows) or data.place.axis in axes_of(axis, data.rank):
        return None
    needs = [x.place if x is data else all_of(x) for x in node.inputs]
    return needs, [data.place] * len(node.outputs)


@rule("StridedSlice", "StridedSliceGrad")
def _strided(node: Node) -> Plan:
    backwards = node.type == "StridedSliceGrad"
    kinds = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {m: node.attr(f"{m}_mask") for m in kinds}
    data = node.inputs[-1 if backwards else 0]
    begin, end, stride = (ints(x) for x in node.inputs[1:4])
    full = ints(node.inputs[0]) if backwards else shape_of(data)
    if begin is None or end is None or stride is None or full is None:
        return None
    if not isinstance(data.place, Rows):
        return None
    rank, m = len(full), data.place.m
    # For each axis of the result: the axis of the data, or None if it is new.
    n, source, at = len(begin), 0, dict[int, int]()
    result_axes: list[int | None] = []
    for i in range(n):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            later = sum(1 for j in range(i + 1, n) if not masks["new_axis"] & (1 << j))
            for _ in range(rank - source - later):
                result_axes.append(source)
                source += 1
        elif masks["new_axis"] & bit:
            result_axes.append(None)
        else:
            at[source] = i
            if not masks["shrink_axis"] & bit:
                result_axes.append(source)
            source += 1
    result_axes += range(source, rank)
    axis = result_axes[data.place.axis] if backwards else data.place.axis
    if axis is None or full[axis] != Dim(m):
        return None
    cut = [n for a, i in at.items() if a != axis for n in (begin[i], end[i], stride[i])]
    if any(isinstance(n, Dim) for n in cut):
        return None  # the number of rows as a place in another axis
    if axis in at:
        bit = 1 << at[axis]
        whole = masks["begin"] & bit or begin[at[axis]] == 0
        to_end = masks["end"] & bit or end[at[axis]] == full[axis]
        if not (whole and to_end) or stride[at[axis]] != 1 or masks["shrink_axis"] & bit:
            return None
    sizes = [Dims(tuple(begin)), Dims(tuple(end)), Dims(tuple(stride))]
    if backwards:
        return [Dims(tuple(full)), *sizes, data.place], [Rows(axis, m)]
    return [data.place, *sizes], [Rows(result_axes.index(axis), m)]


@rule("Slice")
def _slice(node: Node) -> Plan:
    x, begin, size = node.inputs
    b, s = ints(begin), ints(size)
    if b is None or s is None or not isinstance(x.place, Rows):
        return None
    axis = x.place.axis
    others = [n for i, pair in enumerate(zip(b, s, strict=True)) if i != axis for n in pair]
    if b[axis] != 0 or s[axis] not in (-1, Dim(x.place.m)):
        return None
    if any(isinstance(n, Dim) for n in others):
        return None
    return [x.place, Dims(tuple(b)), Dims(tuple(s))], [x.place]


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(node: Node) -> Plan:
    x, amounts, *more = node.inputs
    known = fixed(amounts)
    if known is None or not isinstance(x.place, Rows):
        return None
    if known[2 * x.place.axis] or known[2 * x.place.axis + 1]:
        return None
    return [x.place, ALL, *[ALL] * len(more)], [x.place]


@rule("Tile")
def _tile(node: Node) -> Plan:
    x, counts = node.inputs
    known = fixed(counts)
    if known is None or not isinstance(x.place, Rows) or known[x.place.axis] != 1:
        return None
    return [x.place, Dims(tuple(known))], [x.place]


@rule("BroadcastTo")
def _broadcast_to(node: Node) -> Plan:
    x, shape = node.inputs
    target = ints(shape)
    if target is None or not isinstance(x.place, Rows):
        return None
    axis = len(target) - x.rank + x.place.axis
    if target[axis] != Dim(x.place.m) or any(
        isinstance(n, Dim) for n in target[:axis] + target[axis + 1 :]
    ):
        return None
    return [x.place, Dims(tuple(target))], [Rows(axis, x.place.m)]


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
    if not isinstance(x.place, Rows):
        return None
    at = node.attr("axis") % (x.rank + 1)
    return [x.place, ALL, ALL, ALL], [Rows(x.place.axis + (at <= x.place.axis), x.place.m)]


@rule("UnsortedSegmentSum")
def _segment_sum(node: Node) -> Plan:
    data, ids, count = node.inputs
    if fixed(count) is None or has_partial(node):
        return None
    places = {x.place for x in (data, ids) if isinstance(x.place, Rows)}
    if len(places) != 1 or (place := places.pop()).axis >= ids.rank:
        return None
    if any(x.place == FULL and x.shape[place.axis] is not None for x in (data, ids)):
        return None
    return [place, place, all_of(count)], [SUM]


@rule("MatrixBandPart", "MatrixDiagPartV3", "MatrixDiagV3", "MatrixInverse", "Cholesky")
def _batched_matrices(node: Node) -> Plan:
    x, *more = node.inputs
    if not isinstance(x.place, Rows) or x.place.axis >= x.rank - 2:
        return None
    return [x.place, *[ALL] * len(more)], [x.place]
