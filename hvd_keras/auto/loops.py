"""Loops whose bodies are row-wise run on every rank's rows, with no messages inside.

In a body FULL means that all ranks have it. A size that depends on the batch is this rank's, and
may only be the size of a tensor.
"""

import itertools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util_v2, handle_data_util

from hvd_keras.auto import places
from hvd_keras.auto.places import ALL, FULL, SUM, Dim, Dims, List, Node, Partial, Rows, Value
from hvd_keras.auto.rules import RULES, Plan, elementwise, linear, rule
from hvd_keras.auto.sizes import Shapes, evaluate, ints, sizes_of

CREATE = ("EmptyTensorList", "TensorListReserve", "TensorListFromTensor")
_number = itertools.count()


@rule("TensorListFromTensor")
def _from_tensor(node: Node) -> Plan:
    x, shape = node.inputs
    if not isinstance(x.place, Rows) or x.place.axis == 0:
        return None
    return [x.place, sizes_of(shape)], [List(Rows(x.place.axis - 1, x.place.m))]


@rule("TensorListStack")
def _stack(node: Node) -> Plan:
    the_list, shape = node.inputs
    of = the_list.place.of if isinstance(the_list.place, List) else None
    if not isinstance(of, Rows):
        return None
    return [the_list.place, sizes_of(shape)], [Rows(of.axis + 1, of.m)]


@rule("TensorListGetItem", "TensorListPopBack")
def _take(node: Node) -> Plan:
    the_list = node.inputs[0]
    place = the_list.place
    if not isinstance(place, List) or place.of is None:
        return None
    of = place.of
    if isinstance(of, tuple):  # sizes
        node.outputs[-1].sym, of = np.array(of, object), FULL
    more = [ALL if x.sym is None else sizes_of(x) for x in node.inputs[1:]]
    outs = [of] if node.type == "TensorListGetItem" else [place, of]
    return [place, *more], outs


@rule("TensorListSetItem", "TensorListPushBack")
def _put(node: Node) -> Plan:
    the_list, item = node.inputs[0], node.inputs[-1]
    of: Any = item.place
    if item.sym is not None and any(isinstance(n, Dim) for n in item.sym.ravel()):
        of = tuple(item.sym.ravel()) if item.sym.ndim == 1 else places.unknown()
    if isinstance(of, Partial) or (
        isinstance(the_list.place, List) and the_list.place.of not in (None, of)
    ):
        return None
    more = [ALL if x.sym is None else sizes_of(x) for x in node.inputs[1:-1]]
    last = Dims(of) if isinstance(of, tuple) else ALL if of == FULL else of
    return [List(of), *more, last], [List(of)]


@rule("TensorListLength", "TensorListElementShape")
def _length(node: Node) -> Plan:
    place = node.inputs[0].place
    if not isinstance(place, List):
        return None
    if node.type == "TensorListElementShape":
        known = handle_data_util.get_resource_handle_data(node.op.inputs[0]).shape_and_type
        sizes: list[Any] = [dim.size for dim in known[0].shape.dim] if known else places.unknown()
        if isinstance(place.of, Rows):
            sizes[place.of.axis] = Dim(place.of.m)
        if -1 in sizes:
            return None
        node.outputs[0].sym = np.array(sizes, object)
    return [place], [FULL]


@rule("AddN")
def _add(node: Node) -> Plan:
    lists = {x.place for x in node.inputs if isinstance(x.place, List)} - {List(None)}
    if not lists:
        found: Plan = linear(node)
        return found
    return ([*lists] * len(node.inputs), [*lists]) if len(lists) == 1 else None


@rule("TensorListReserve")
def _empty(node: Node) -> Plan:
    return [ALL if x.sym is None else sizes_of(x) for x in node.inputs], [List(None)]


@rule("ZerosLike")
def _zeros_like(node: Node) -> Plan:
    (x,) = node.inputs
    return ([x.place], [x.place]) if isinstance(x.place, List) else elementwise(node)


def uniform(node: Node) -> Plan:
    """Equal numbers for each row: a size of the batch makes rows."""
    if node.type not in ("Fill", "BroadcastTo", "Tile"):
        return None
    x, shape = node.inputs if node.type != "Fill" else (node.inputs[1], node.inputs[0])
    found = ints(shape) or []
    at = [i for i, n in enumerate(found) if isinstance(n, Dim)]
    if len(at) != 1 or found[at[0]].k != 1 or isinstance(x.place, (Rows, List)):
        return None
    axis = at[0] - len(found) + x.rank if node.type != "Fill" else -1
    if axis >= 0 and x.shape[axis] != 1:
        return None
    needs = [ALL, Dims(tuple(found))]
    return (needs if node.type != "Fill" else needs[::-1]), [Rows(at[0], found[at[0]].c)]


class Body:
    """The ops of a loop's body or condition, all of which every rank computes."""

    def __init__(self, graph: Any, inputs: list[Value]) -> None:
        self.inputs, self.nodes = inputs, list[Node]()
        self._shapes = Shapes()
        for value in inputs:
            self._shapes.add(value)
        self.outputs = places.inlined(graph, inputs, self._place)

    def _place(self, op: Any, graph: Any, values: list[Value]) -> list[Value]:
        if op.type == "ReadVariableOp":
            return values
        node = Node(op, values, graph)
        if op.op_def.is_stateful or node.calls:
            raise places.UnknownError(op.type)
        evaluate(node)
        self._shapes.infer(node, values)
        placed = [FULL] * len(node.outputs)
        node.needs = [ALL] * len(values)
        local = [x.is_size for x in values]
        if node.outputs and all(v.sym is not None for v in node.outputs):
            node.needs = [x.place if x.place != FULL else ALL for x in values]
        elif node.type == "TensorListReserve" or any(x.place != FULL for x in values) or any(local):
            found = uniform(node) if any(local) else None
            found = found or (RULES[node.type](node) if node.type in RULES else None)
            if found is None or node.emit:
                raise places.UnknownError(f"{node.type} of {[x.place for x in values]}")
            node.needs, placed = list(found[0]), found[1]
            for x, need, is_local in zip(values, node.needs, local, strict=True):
                free = need == ALL and x.place == FULL and not is_local
                same = need == x.place or (isinstance(need, List) and x.place == List(None))
                if not (free or same or isinstance(need, Dims)):
                    raise places.UnknownError(f"{node.type}: {x.place} as {need}")
        for value, place in zip(node.outputs, placed, strict=True):
            value.place = place
        self.nodes.append(node)
        return node.outputs

    def build(self, name: str, dtypes: list[Any]) -> str:
        """Make a function of the ops in the current graph."""
        graph = FuncGraph(f"{name}_{next(_number)}")
        with graph.as_default():
            graph.inputs = [tf.compat.v1.placeholder(d) for d in dtypes]
            have = {id(v): t for v, t in zip(self.inputs, graph.inputs, strict=True)}
            for tensor, value in zip(graph.inputs, self.inputs, strict=True):
                tensor.set_shape(value.shape)
            for node in self.nodes:
                outputs = node.copied(graph, [have[id(x)] for x in node.inputs])
                have.update({id(v): t for v, t in zip(node.outputs, outputs, strict=True)})
            graph.outputs = [tf.identity(have[id(v)]) for v in self.outputs]
        return str(control_flow_util_v2.create_new_tf_function(graph))


def _join(before: Any, after: Any) -> Any:
    if before == after or after == List(None):
        return before
    if isinstance(after, Partial) and after != SUM:  # workers begin with 0, which counts
        raise places.UnknownError(f"loop variable {before} becomes {after}")
    if before in (FULL, List(None)) and not (isinstance(before, List) and after == FULL):
        return after
    raise places.UnknownError(f"loop variable {before} becomes {after}")


def place_while(plan: Any, node: Node) -> list[Any]:
    """Make a loop run on all ranks; return the places of its results, or raise UnknownError."""
    functions = (node.graph._get_function(node.attr(n).name) for n in ("body", "cond"))
    body, cond = (getattr(function, "graph", None) for function in functions)
    if body is None or cond is None:
        raise places.UnknownError("a loop of an older kind")
    inputs = list(node.inputs)
    for i, x in enumerate(inputs):
        if x.dtype == tf.resource:
            inputs[i] = _read(plan, body, i, x)
        elif (
            x.dtype == tf.variant and x.place == FULL and (not x.node or x.node.type not in CREATE)
        ):
            raise places.UnknownError("a list of rank 0")
    placed = [_of_list(x) if x.dtype == tf.variant and x.place == FULL else x.place for x in inputs]
    same = [_source(o) is a for a, o in zip(body.inputs, body.outputs, strict=True)]
    # States have the rows of the batch, whatever they begin with.
    guess = [
        Rows(0) if p == FULL and not is_same and _has_rows(x) else p
        for p, x, is_same in zip(placed, inputs, same, strict=True)
    ]
    adds_up = [_adds(_source(o).op, a) for a, o in zip(body.inputs, body.outputs, strict=True)]
    sums = [
        SUM if p == FULL and adds and x.dtype.is_floating and x.shape.is_fully_defined() else p
        for p, x, adds in zip(guess, inputs, adds_up, strict=True)
    ]
    for start in (sums, guess, placed):
        try:
            placed, values, traced = _settle(body, inputs, start, same)
            break
        except places.UnknownError as error:
            why = error
    else:
        raise why
    test = Body(cond, values)
    if test.outputs[0].place != FULL:
        raise places.UnknownError
    node.inputs = inputs
    node.needs = [ALL if p == FULL else p for p in placed]
    node.emit, node.parts = "while", (traced, test)
    if any(x.is_size for x in inputs):
        raise places.UnknownError("a size of the batch")
    return list(placed)


def _adds(op: Any, tensor: Any) -> bool:
    return op.type in ("AddN", "AddV2") and any(_source(t) is tensor for t in op.inputs)


def _has_rows(x: Value) -> bool:
    """Whether it is known that a tensor of rank 0 has the rows of the batch."""
    is_fill = x.node is not None and x.node.type == "Fill"
    return is_fill and (ints(x.node.inputs[0]) or [0])[0] == Dim(1)  # type: ignore[union-attr]


def _settle(body: Any, inputs: list[Value], placed: list[Any], same: list[bool]) -> Any:
    """The places of loop variables which those after a round agree with."""
    for _ in range(8):
        values = []
        for x, place, is_same, t in zip(inputs, placed, same, body.inputs, strict=True):
            value = Value(None, x, place)
            value.shape = x.shape if is_same or x.dtype == tf.variant else t.shape
            value.sym = x.sym if is_same else None
            values.append(value)
        traced = Body(body, values)
        after = [_join(p, v.place) for p, v in zip(placed, traced.outputs, strict=True)]
        if after == placed:
            if any(v.is_size for v in traced.outputs):
                raise places.UnknownError("a size of the batch")
            return placed, values, traced
        placed = after
    raise places.UnknownError("no fixed point")


def _of_list(x: Value) -> List:
    """A list that rank 0 made, on every rank."""
    assert x.node is not None
    if x.node.type != "TensorListFromTensor":
        return List(None)
    shape = x.node.inputs[0].shape
    return List(Rows(0) if shape.rank and shape.rank > 1 and shape[1] is None else FULL)


def _source(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _read(plan: Any, body: Any, index: int, resource: Value) -> Value:
    """The value of a variable which a body reads."""
    users = body.inputs[index].consumers()
    for op in users:
        if op.type == "ReadVariableOp":
            read = Node(op, [resource], body)
            plan.place(read)
            return read.outputs[0]
    raise places.UnknownError("a resource in a loop")
