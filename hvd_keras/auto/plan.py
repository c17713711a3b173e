"""Places every tensor of a traced step: the rules applied to all its ops, calls inlined."""

import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from hvd_keras.auto import layout as layout  # its rules
from hvd_keras.auto import loops, places
from hvd_keras.auto.places import ALL, FULL, ROOT, SENT, Dim, Dims, List, Node, Partial, Rows, Value
from hvd_keras.auto.rules import ELEMENTWISE, RULES
from hvd_keras.auto.sizes import Shapes, evaluate, fixed, shape_of, sizes_of
from hvd_keras.ops.allreduce import called_by
from hvd_keras.runtime import flight

# What may use any variable, out of sight.
_OPAQUE = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
# Ops that workers repeat, rather than get their results, if what these need is small.
_REPEATED = places.words(
    """Const Reshape ExpandDims Squeeze Fill Range Pack ConcatV2 StridedSlice Transpose BroadcastTo
    Tile StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2
    StatelessRandomUniformIntV2 StatelessRandomGetKeyCounter StatelessRandomUniformFullIntV2
    MatrixBandPart LinSpace Sum Mean"""
)
_REPEATED += ELEMENTWISE
_SMALL = 4096  # numbers
# Sums of so many rounds travel to rank 0 together: the other ranks wait for none of them.
_SUMS_OF_ROUNDS = 8
# Ops that give a sum another shape: it is exchanged once.
_SAME_NUMBERS = ("Identity", "StopGradient", "PreventGradient", "Reshape", "Squeeze", "ExpandDims")


class Plan:
    """The ops of a function in rounds between which the ranks exchange tensors."""

    def __init__(
        self,
        graph: Any,
        divided: list[bool],
        captured: Sequence[Any] = (),
        rows: int = 0,
        shapes: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        """Place all ops.

        Args:
            graph: of the function.
            divided: which of its inputs have the rows of the batch on axis 0.
            captured: what the last inputs are in each call, if variables may be kept.
            rows: those of a usual batch; 0: too many to keep any table on the first rank.
            shapes: of inputs, where the graph does not know all of them.
        """
        self.nodes: list[Node] = []
        self.whole: list[str] = []  # ops that need the rows of all ranks on the first one
        # By value and need: after which round it is made, how, and of what.
        self.exchanges: dict[tuple[int, Any], tuple[int, str, Value]] = {}
        self._touched: dict[Any, int] = defaultdict(int)  # the last round that uses a resource
        self._floor = 0  # the last round of what may use any
        self._batch = rows or sys.maxsize
        self._small: dict[int, bool] = {}
        self.inputs = [Value(None, t) for t in graph.inputs]
        for i, shape in shapes.items():
            self.inputs[i].shape = shape
        self._shapes = Shapes()
        self._changed: set[Value] = set()  # resources of other ops than reads and loops
        places.inlined(graph, self.inputs, self._note_changed)
        arguments = []
        for value, is_divided in zip(self.inputs, divided, strict=True):
            self._shapes.add(value)
            arguments.append(self._rows_of(value, Rows(0)) if is_divided else value)
        self.outputs = places.inlined(graph, arguments, self._place_op)
        for value in self.outputs:
            self.level_of(value, ROOT)
        # Handles of variables that it reads alone, with the values, and of those that it assigns.
        self.kept: dict[int, tuple[Any, Value]] = {}
        self.assigned: list[Any] = []
        self._keep(captured)

    def _keep(self, captured: Sequence[Any]) -> None:
        others = [n for n in self.nodes if n.type != "ReadVariableOp"]
        # A loop that all ranks run assigns nothing.
        calls = [n for n in others if n.op.op_def.is_stateful and n.calls and n.emit != "while"]
        if calls or any(n.type in _OPAQUE for n in others):
            return  # what they assign is out of sight
        used = {_origin(x) for n in others for x in n.inputs if x.dtype == tf.resource}
        first = len(self.inputs) - len(captured)
        handles = {x: captured[i] for i, x in enumerate(self.inputs[first:])}
        self.assigned = [handles[x] for x in used if x in handles]
        for key, (level, kind, value) in self.exchanges.items():
            if kind != "broadcast" or value.node is None or value.node.type != "ReadVariableOp":
                continue
            variable = _origin(value.node.inputs[0])
            if variable in handles and variable not in used and value.shape.is_fully_defined():
                self.exchanges[key] = level, "keep", value
                self.kept[id(value)] = handles[variable], value

    def _note_changed(self, op: Any, graph: Any, values: list[Value]) -> list[Value]:
        if op.type != "ReadVariableOp" and "While" not in op.type:
            self._changed.update(x for x in values if x.dtype == tf.resource)
        return [Value(None, t) for t in op.outputs]

    def _is_large(self, node: Node) -> bool:
        """Whether a table changes in each step, and has more bytes than the rows it gives or gets.

        Then it stays on rank 0, and its rows travel.
        """
        if node.type == "GatherV2":
            table, ids, axis = node.inputs
            read = _origin(table, "Cast").node
            if read is None or read.type != "ReadVariableOp" or fixed(axis) != [0]:
                return False
            if not isinstance(ids.place, Rows) or _origin(read.inputs[0]) not in self._changed:
                return False
            whole, moved = table.shape.as_list(), shape_of(ids) + table.shape[1:].as_list()
        else:
            data, ids, count = node.inputs
            sizes: list[Any] = fixed(count) or [None]
            whole, moved = [*sizes, *data.shape[ids.rank :]], shape_of(data)
        moved = [n.c * self._batch**n.k if isinstance(n, Dim) else n for n in moved]
        return None not in (*whole, *moved) and math.prod(whole) > math.prod(moved)

    def _rows_of(self, value: Value, place: Rows) -> Value:
        """Return a tensor of rank 0 as the ops see it: its rows, once they are sent."""
        rows = Value(None, value, place)
        rows.level, rows.source = self._exchange(value, place, value.level, "scatter"), value
        self._shapes.add(rows)
        return rows

    def _place_op(self, op: Any, graph: Any, values: list[Value]) -> list[Value]:
        if op.type == "Placeholder":
            raise places.WholeError(f"its input {op.name} is unknown")
        node = Node(op, values, graph)
        self.place(node)
        if node.sent is not None:
            return [self._rows_of(node.outputs[0], node.sent)]
        if "While" not in op.type:
            return node.outputs
        # A variable is the same afterwards.
        pairs = enumerate(node.outputs)
        return [values[i] if v.dtype == tf.resource else v for i, v in pairs]

    def place(self, node: Node) -> None:
        """Place one op, whose inputs are placed."""
        evaluate(node)
        self._shapes.infer(node, node.inputs)
        is_stateful = bool(node.op.op_def.is_stateful)
        if (drawing := _drawing(node.op)) is not None:
            raise places.WholeError(
                f"{drawing.type}{_line_of(drawing)} draws random numbers by a state that one trace "
                "has; use keras.random"
            )
        if node.outputs and all(v.sym is not None for v in node.outputs) and not is_stateful:
            node.needs, node.inputs, node.emit = [], [], "sizes"
            node.level = int(any(v.is_size for v in node.outputs))
        elif any(x.place != FULL for x in node.inputs) or loops.uniform(node):
            self._divide(node)
        else:
            node.level = max((x.level for x in node.inputs), default=0)
        if is_stateful:  # what uses a variable keeps its order
            keys: list[Any] = [id(_origin(x)) for x in node.inputs if x.dtype == tf.resource]
            keys = [*self._touched, "other"] if node.type in _OPAQUE else keys or ["other"]
            node.level = max(node.level, self._floor, *(self._touched[k] for k in keys))
            self._touched.update(dict.fromkeys(keys, node.level))
            if node.type in _OPAQUE:
                self._floor = node.level
        for value in node.outputs:
            value.level = node.level
        self.nodes.append(node)

    def _divide(self, node: Node) -> None:
        inputs = node.inputs
        try:
            placed = self._places(node)
            for x, need in zip(node.inputs, node.needs, strict=True):
                self._feasible(x, need)
        except (places.UnknownError, ValueError, IndexError, TypeError):
            node.inputs, node.emit = inputs, None
            node.needs = [ROOT] * len(inputs)
            placed = [FULL] * len(node.outputs)
            self._note_whole(node)
        node.level = max(
            self.level_of(x, need) for x, need in zip(node.inputs, node.needs, strict=True)
        )
        if node.needs and not node.is_whole:
            node.level = max(node.level, 1)
        for value, place in zip(node.outputs, placed, strict=True):
            value.place = place
            value.is_everywhere = place == FULL and not node.is_whole and node.emit != "shape"
            is_sum = isinstance(place, Partial) and value.shape.is_fully_defined()
            value.of = node.inputs[0] if is_sum and node.type in _SAME_NUMBERS else None

    def _places(self, node: Node) -> list[Any]:
        """Set what a node needs; return the places of its outputs."""
        if node.type == "Shape" and isinstance(node.inputs[0].place, Rows):
            node.needs, node.emit = [node.inputs[0].place], "shape"
            return [FULL]
        if node.type in ("While", "StatelessWhile"):
            return loops.place_while(self, node)
        if node.type in ("GatherV2", "UnsortedSegmentSum") and self._is_large(node):
            node.sent = node.inputs[1].place if node.type == "GatherV2" else None
            return [FULL]
        found = loops.uniform(node)
        if found is not None:
            self._make_whole_too(node)
        elif node.type in RULES:
            found = RULES[node.type](node)
        if found is None:
            raise places.UnknownError
        node.needs = list(found[0])
        return found[1]

    def _make_whole_too(self, node: Node) -> None:
        """Let rank 0 compute the whole of equal rows, if something needs it."""
        whole = Node(node.op, node.inputs, node.graph)
        whole.level = max(self.level_of(x, ROOT) for x in whole.inputs)
        whole.outputs[0].level = whole.level
        self.nodes.append(whole)
        node.outputs[0].source = whole.outputs[0]

    def _note_whole(self, node: Node) -> None:
        """Note an op that gets gathered rows, unless it updates a variable with them."""
        has_rows = any(isinstance(x.place, Rows) for x in node.inputs)
        if has_rows and all(x.dtype != tf.resource for x in node.inputs):
            text = f"{node.type}{_line_of(node.op)}"
            if text not in self.whole:
                self.whole.append(text)

    def _feasible(self, value: Value, need: Any) -> None:
        """Raise UnknownError if a tensor cannot be had like that."""
        if isinstance(need, Dims) or need == value.place or need == ROOT:
            return
        if need == ALL and value.is_everywhere:
            return
        if isinstance(need, List) and value.node is not None and value.node.type in loops.CREATE:
            return
        if value.dtype.name not in SENT or value.shape.rank is None:
            raise places.UnknownError
        sizes = value.shape.as_list()
        if isinstance(need, Rows):
            del sizes[need.axis]
        is_sum = isinstance(value.place, Partial)
        if None in sizes and not (need == ALL and (is_sum or self.is_repeated(value))):
            raise places.UnknownError
        if isinstance(need, Partial) and value.place != FULL:
            raise places.UnknownError

    def _exchange(self, value: Value, need: Any, level: int, kind: str) -> int:
        at, _, _ = self.exchanges.setdefault((id(value), need), (level, kind, value))
        return at + 1

    def level_of(self, value: Value, need: Any) -> int:
        """Return after which round a tensor is there as it is needed; notes the exchange for it."""
        place, node = value.place, value.node
        if isinstance(need, Dims):
            return int(any(isinstance(n, Dim) for n in need.of))
        if need == place or (need == ROOT and place == FULL):
            return value.level
        if need == ALL and value.is_everywhere:
            return value.level
        if isinstance(need, List) and place in (FULL, List(None)) and node is not None:
            if place == List(None):
                return value.level
            of = [(x, need_of_list(node, x, need)) for x in node.inputs]
            return max([value.level, 1] + [self.level_of(x, n) for x, n in of])
        if isinstance(place, List) or (place != FULL and value.dtype.name not in SENT):
            raise places.WholeError(f"{node.type if node else 'an input'} makes a list of rows")
        level = value.level
        if value.of is not None and need in (ROOT, ALL):
            return self.level_of(value.of, need)
        if value.source is not None:
            level = value.source.level
            if need == ROOT:
                return level
        elif isinstance(place, Partial):
            level = self._level_of_sum(value, need)
            if need in (ROOT, ALL):
                return level
        elif place != FULL:
            level = self._exchange(value, ROOT, value.level, "gather")
            if need == ROOT:
                return level
        if isinstance(need, Partial):
            return max(level, 1)
        if place == FULL and self.is_repeated(value):
            assert node is not None
            of_inputs = [self.level_of(x, ALL) for x in node.inputs]
            return max(level, int(isinstance(need, Rows)), *of_inputs)
        return self._exchange(value, need, level, "broadcast" if need == ALL else "scatter")

    def _level_of_sum(self, value: Value, need: Any) -> int:
        if need == ALL:
            self.exchanges[id(value), ROOT] = value.level, "allreduce", value
            return value.level + 1
        rounds = 1 if is_small(value) else _SUMS_OF_ROUNDS
        return self._exchange(value, ROOT, -(-value.level // rounds) * rounds, "reduce")

    def is_repeated(self, value: Value) -> bool:
        """Whether workers compute a tensor of rank 0 themselves."""
        if id(value) not in self._small:
            node = value.node
            may = node is not None and node.type in _REPEATED and node.is_whole
            self._small[id(value)] = value.place == FULL and (
                value.sym is not None
                or (may and all(self.is_repeated(x) or is_small(x) for x in node.inputs))  # type: ignore[union-attr]
            )
        return self._small[id(value)]


def need_of_list(node: Node, value: Value, need: List) -> Any:
    """Return what each rank needs to make a list that rank 0 has made."""
    if node.type == "TensorListFromTensor" and value is node.inputs[0]:
        return Rows(need.of.axis + 1, need.of.m) if isinstance(need.of, Rows) else ALL
    return ALL if value.sym is None else sizes_of(value)


def _drawing(op: Any) -> Any:
    """An op, or one that it calls, which draws random numbers by a state of its own; else None."""
    if op.op_def.is_stateful and "seed" in op.node_def.attr and "Cudnn" not in op.type:
        return op
    return next(filter(None, map(_drawing, called_by(op))), None)


def _line_of(op: Any) -> str:
    """Return the script's line that has made an op, such as " (train.py:7)"; "" if unknown."""
    for frame in reversed(op.traceback or ()):
        if flight.is_script(frame.filename):
            return f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    return ""


def _origin(value: Value, *through: str) -> Value:
    while value.node is not None and value.node.type in ("Identity", *through):
        value = value.node.inputs[0]
    return value


def is_small(value: Value) -> bool:
    """Whether a message about a tensor takes as long as an empty one."""
    count = value.shape.num_elements()
    return value.dtype.name in SENT and count is not None and count <= _SMALL
