"""Builds rank 0's and the workers' graph of a plan: the same ops on each rank's tensors."""

import collections
import itertools
from typing import Any

import tensorflow as tf

from hvd_keras.auto.keep import read
from hvd_keras.auto.places import ALL, FULL, ROOT, Dim, Dims, List, Node, Partial, Rows, Value
from hvd_keras.auto.plan import Plan, is_small, need_of_list
from hvd_keras.gradients import specs
from hvd_keras.ops.validate import raw

_Attr = tf.compat.v1.AttrValue


class Side:
    """One rank's part of a step, built in the current graph."""

    def __init__(self, plan: Plan, name: str, rank: Any, size: int, inputs: list[Any] | None):
        """``inputs``: those of the function, on rank 0; None on the others."""
        self.plan, self.name, self.is_root = plan, name, inputs is not None
        self.rank, self.size = rank, size
        self._graph: Any = tf.compat.v1.get_default_graph()
        self._have: dict[tuple[int, Any], Any] = {}
        self._rows: Any = None  # of the whole batch
        for value, tensor in zip(plan.inputs, inputs or (), strict=inputs is not None):
            self._have[id(value), ROOT] = tensor
            if self._rows is None and (id(value), Rows(0)) in plan.exchanges:
                self._rows = tf.shape(tensor, tf.int64)[0]

    def build(self) -> list[Any]:
        """Add all ops; return the outputs of the function, on rank 0."""
        by_level = collections.defaultdict[int, list[Node]](list)
        for node in self.plan.nodes:
            by_level[node.level].append(node)
        levels = {0, *by_level, *(level for level, _, _ in self.plan.exchanges.values())}
        for level in sorted(levels):
            for node in by_level[level]:
                self._node(node)
            self._exchange(level)
        return [self._get(v, ROOT) for v in self.plan.outputs] if self.is_root else []

    # What a rank has

    def _get(self, value: Value, need: Any) -> Any:
        """Return a tensor as a node needs it; what has to be sent for it has been sent."""
        if isinstance(need, Dims):
            return self._numbers(need.of, self._here, value.dtype, need.scalar)
        if value.source is not None and need in (ROOT, value.place):
            return self._have[id(value.source), need]
        if need == value.place or (need == ROOT and value.place == FULL):
            return self._have[id(value), ROOT if value.place == FULL else value.place]
        key = id(value), need
        if key not in self._have:
            self._have[key] = self._derive(value, need)
        return self._have[key]

    def _derive(self, value: Value, need: Any) -> Any:
        node = value.node
        if value.of is not None and need in (ROOT, ALL):
            return tf.reshape(self._get(value.of, need), value.shape)
        if isinstance(need, List):
            if value.place == List(None):
                return self._have[id(value), value.place]
            assert node is not None
            return self._copy(
                node, [self._get(x, need_of_list(node, x, need)) for x in node.inputs]
            )[0]
        if need == ALL:
            if self.is_root:
                return self._get(value, ROOT)
            if (id(value), ROOT) in self.plan.exchanges and isinstance(value.place, Partial):
                return self._have[id(value), ROOT]  # an allreduce gives it to all
            return self._repeat(value)
        if isinstance(need, Partial):
            return self._get(value, ROOT) if self.is_root else tf.zeros(value.shape, value.dtype)
        assert isinstance(need, Rows), need
        whole = self._get(value, ALL)
        first, last = self._start * need.m, self._stop * need.m
        begin, size = [0] * value.rank, [-1] * value.rank
        if value.shape[need.axis] is None:  # it may be 1
            shape = tf.unstack(tf.shape(whole, tf.int64), num=value.rank)
            shape[need.axis] = self._rows * need.m
            whole = tf.broadcast_to(whole, shape)
        begin[need.axis], size[need.axis] = first, last - first
        return tf.slice(whole, *(tf.cast(tf.stack(n), tf.int64) for n in (begin, size)))

    def _repeat(self, value: Value) -> Any:
        node = value.node
        assert node is not None
        build = self._sizes if node.emit == "sizes" else self._copy
        outputs = build(node, [self._get(x, ALL) for x in node.inputs])
        for one, tensor in zip(node.outputs, outputs, strict=True):
            self._have[id(one), ALL] = tensor
        return self._have[id(value), ALL]

    # Ops

    def _node(self, node: Node) -> None:
        if not self.is_root and (node.emit in ("sizes", "shape") or node.is_whole):
            return
        inputs = [self._get(x, need) for x, need in zip(node.inputs, node.needs, strict=True)]
        build = getattr(self, f"_{node.emit}") if node.emit else self._copy
        outputs = build(node, inputs)
        for value, tensor in zip(node.outputs, outputs, strict=True):
            of = value.source or value
            self._have[id(of), ROOT if value.place == FULL else value.place] = tensor
            if value.is_everywhere:
                self._have[id(value), ALL] = tensor

    def _copy(self, node: Node, inputs: list[Any]) -> list[Any]:
        for attr in node.attributes.values():
            if attr.HasField("func"):
                self._graph._add_function_recursive(node.graph._get_function(attr.func.name))
        name = node.op.name.split("/")[-1].strip("_") or None
        outputs = node.copied(self._graph, inputs, name)
        for old, tensor, value in zip(node.op.outputs, outputs, node.outputs, strict=True):
            if tensor.shape.rank is None and old.shape.rank is not None:
                tensor.set_shape(value.shape)
        return outputs

    def _while(self, node: Node, inputs: list[Any]) -> list[Any]:
        body, test = node.parts
        dtypes = [t.dtype for t in inputs]
        attrs = {k: v for k, v in node.attributes.items() if k == "parallel_iterations"}
        for part, key in ((body, "body"), (test, "cond")):
            name = part.build(f"{self.name}_{key}", dtypes)
            attrs[key] = _Attr(func=tf.compat.v1.NameAttrList(name=name))
        attrs["T"] = _Attr(list=_Attr.ListValue(type=[d.as_datatype_enum for d in dtypes]))
        shapes = [v.shape.as_proto() for v in body.inputs]
        attrs["output_shapes"] = _Attr(list=_Attr.ListValue(shape=shapes))
        new = self._graph._create_op_internal("StatelessWhile", inputs, dtypes, attrs=attrs)
        return list(new.outputs)

    def _mean(self, node: Node, inputs: list[Any]) -> list[Any]:
        """Its summand: the mean of this rank's rows, times their share of the batch."""
        x, axes = inputs
        wide = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
        mean = tf.reduce_mean(wide, axes, keepdims=node.attr("keep_dims"))
        return [tf.cast(mean * tf.cast(self._here / self._rows, wide.dtype), x.dtype)]

    def _shape(self, node: Node, inputs: list[Any]) -> list[Any]:
        sizes = tf.unstack(tf.shape(inputs[0], tf.int64), num=node.inputs[0].rank)
        sizes[node.needs[0].axis] = self._rows * node.needs[0].m
        return [tf.cast(tf.stack(sizes), node.outputs[0].dtype)]

    def _sizes(self, node: Node, _: list[Any]) -> list[Any]:
        found = []
        for value in node.outputs:
            assert value.sym is not None
            flat = self._numbers(tuple(value.sym.ravel()), self._rows, value.dtype, False)
            found.append(tf.reshape(flat, value.sym.shape))
        return found

    def _numbers(self, sizes: tuple[Any, ...], rows: Any, dtype: Any, scalar: bool) -> Any:
        if any(isinstance(n, Dim) for n in sizes):
            parts = [tf.cast(rows**n.k * n.c if isinstance(n, Dim) else n, dtype) for n in sizes]
            return parts[0] if scalar else tf.stack(parts)
        return tf.constant(sizes[0] if scalar else [*sizes], dtype)

    # Messages

    def _exchange(self, level: int) -> None:
        items = self.plan.exchanges.items()
        found = [(v, key[1], kind) for key, (at, kind, v) in items if at == level]
        # Rows first: ops that need the first weights begin while the others travel.
        for i, (value, need, kind) in enumerate(found):
            name = f"{self.name}.{level}.{kind}.{i}"
            if kind == "scatter":
                self._scatter(value, need, name)
            elif kind == "gather":
                self._gather(value, name)
            elif kind == "keep":
                kept = self.plan.kept[id(value)]
                self._have[id(value), ALL] = self._get(value, ROOT) if self.is_root else read(*kept)
        self._broadcast([v for v, _, kind in found if kind == "broadcast"], level)
        to_all = [v for v, _, kind in found if kind == "allreduce"]
        to_root = [v for v, _, kind in found if kind == "reduce"]
        if to_all:  # which takes small ones along
            to_all += filter(is_small, to_root)
            to_root = list(itertools.filterfalse(is_small, to_root))
        self._reduce(to_root, level, "reduce", {"root_rank": 0})
        self._reduce(to_all, level, "allreduce", {})
        if level == 0:
            self._start = self.rank * self._rows // self.size
            self._stop = (self.rank + 1) * self._rows // self.size
            self._here = self._stop - self._start

    def _broadcast(self, values: list[Value], level: int) -> None:
        for i, some in enumerate(_in_buckets(values) or [[]] * (level == 0)):
            mine = [
                self._get(v, ROOT) if self.is_root else tf.zeros(v.shape, v.dtype) for v in some
            ]
            if level == i == 0:
                mine.append(self._rows if self.is_root else tf.zeros([], tf.int64))
            got = self._call("broadcast", mine, f"{self.name}.{level}.{i}", root_rank=0)
            got = mine if self.is_root else got
            if level == i == 0:
                self._rows = got.pop()
            self._have.update({(id(v), ALL): t for v, t in zip(some, got, strict=True)})

    def _reduce(self, values: list[Value], level: int, kind: str, to: dict[str, int]) -> None:
        for op in ("Sum", "Max", "Min"):
            for i, some in enumerate(_in_buckets([v for v in values if v.place == Partial(op)])):
                mine = [self._have[id(v), v.place] for v in some]
                got = self._call(kind, mine, f"{self.name}.{level}.{op}.{i}", reduction=op, **to)
                self._have.update({(id(v), ROOT): t for v, t in zip(some, got, strict=True)})

    def _scatter(self, value: Value, need: Rows, name: str) -> None:
        order = [need.axis, *(i for i in range(value.rank) if i != need.axis)]
        inner = [value.shape[i] for i in order[1:]]
        if self.is_root:
            whole = self._get(value, ROOT)
            whole = tf.transpose(whole, order) if need.axis else whole
            if value.node is not None:  # it may have one row for all
                whole = tf.broadcast_to(whole, tf.stack([self._rows * need.m, *inner]))
            edges = tf.range(self.size + 1, dtype=tf.int64) * self._rows // self.size
            splits = (edges[1:] - edges[:-1]) * need.m
        else:
            whole, splits = tf.zeros([0, *inner], value.dtype), tf.zeros([self.size], tf.int64)
        self._have[id(value), need] = self._move(whole, splits, name, order, value.shape)

    def _gather(self, value: Value, name: str) -> None:
        axis = value.place.axis
        order = [axis, *(i for i in range(value.rank) if i != axis)]
        mine = self._get(value, value.place)
        mine = tf.transpose(mine, order) if axis else mine
        splits = tf.concat([tf.shape(mine, tf.int64)[:1], tf.zeros([self.size - 1], tf.int64)], 0)
        got = self._move(mine, splits, name, order, value.shape)
        if self.is_root:
            self._have[id(value), ROOT] = got

    def _move(self, tensor: Any, splits: Any, name: str, order: list[int], shape: Any) -> Any:
        got, _ = raw.hvd_alltoall(tensor, splits, tensor_name=name, process_set=0)
        got.set_shape([None, *(shape[i] for i in order[1:])])
        back = sorted(range(len(order)), key=order.__getitem__)
        return tf.transpose(got, back) if order[0] else got

    def _call(self, kind: str, tensors: list[Any], name: str, **attrs: Any) -> list[Any]:
        return list(getattr(raw, f"hvd_{kind}")(tensors, tensor_name=name, process_set=0, **attrs))


def _in_buckets(values: list[Value]) -> list[list[Value]]:
    """Return values by the requests in which they travel, each as soon as all of it is there."""
    return specs.in_buckets(values, lambda v: (v.shape.num_elements() or 1) * v.dtype.size)
