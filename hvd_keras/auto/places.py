"""Where a tensor of one step is, and as what an op needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

FULL = "full"  # a place: on rank 0 alone
ROOT = "root"  # a need: as a whole on rank 0
ALL = "all"  # a need: as a whole on every rank

#: The dtypes that ranks can send each other.
SENT = {"bool", "float16", "bfloat16", "float32", "float64"}
SENT |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def words(text: str) -> list[str]:
    """Return the names in a table."""
    return text.split()


@dataclasses.dataclass(frozen=True)
class Rows:
    """Each rank has a block of the axis; the axis is ``m`` times as long as the batch."""

    axis: int
    m: int = 1


@dataclasses.dataclass(frozen=True)
class Partial:
    """The whole is the sum (or max, min) of what the ranks have."""

    op: str = "Sum"


@dataclasses.dataclass(frozen=True)
class List:
    """A tensor list on every rank, whose elements have that place; None: still empty."""

    of: Any = None


SUM = Partial()


@dataclasses.dataclass(frozen=True)
class Dim:
    """``c`` times the number of rows of the batch, to the power of ``k``."""

    c: int
    k: int = 1

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            return Dim(self.c * other.c, self.k + other.k)
        if int(other) < 1:
            raise UnknownError
        return Dim(self.c * int(other), self.k)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        c, k = (other.c, other.k) if isinstance(other, Dim) else (int(other), 0)
        if c < 1 or self.c % c or k > self.k:
            raise UnknownError
        return Dim(self.c // c, self.k - k) if k < self.k else self.c // c


class UnknownError(Exception):
    """A number cannot be written as a ``Dim``, or an op has no rule for such inputs."""


def unknown() -> Any:
    """Raise ``UnknownError``, in an expression."""
    raise UnknownError


class WholeError(Exception):
    """A function cannot be divided at all; it runs unchanged on rank 0."""


@dataclasses.dataclass(frozen=True)
class Dims:
    """A need: these sizes, with this rank's rows in place of the batch's."""

    of: tuple[Any, ...]
    scalar: bool = False


class Value:
    """One output of a node, or an input of the function."""

    def __init__(self, node: Node | None, tensor: Any, place: Any = FULL) -> None:
        self.node, self.place = node, place
        self.dtype, self.shape = tensor.dtype.base_dtype, tensor.shape
        self.level = 0  # how many rounds of messages come before it
        self.sym: np.ndarray[Any, Any] | None = None  # its numbers, if they are sizes
        self.is_everywhere = False  # whether all ranks compute it, though it is FULL
        self.source: Value | None = None  # of rows: the whole, which rank 0 has
        self.of: Value | None = None  # of a sum: that of the same numbers in another shape

    @property
    def rank(self) -> int:
        """The number of axes."""
        if self.shape.rank is None:
            raise UnknownError
        return int(self.shape.rank)

    @property
    def is_size(self) -> bool:
        """Whether it has a size that depends on the number of rows."""
        return self.sym is not None and any(isinstance(n, Dim) for n in self.sym.ravel())


class Node:
    """An op of the step, with what it needs and where its outputs are."""

    def __init__(self, op: Any, inputs: list[Value], graph: Any) -> None:
        self.op, self.inputs, self.graph = op, inputs, graph
        self.type: str = op.type
        self.needs: list[Any] = [ROOT] * len(inputs)
        self.outputs = [Value(self, t) for t in op.outputs]
        self.level = 0
        self.emit: str | None = None  # builds it in another way
        self.sent: Rows | None = None  # where its output's rows are, if rank 0 sends them
        self.parts: Any = None  # of a loop: its body and its condition

    def attr(self, name: str) -> Any:
        """Return an attribute of the op."""
        return self.op.get_attr(name)

    @property
    def attributes(self) -> dict[str, Any]:
        """All attributes that a copy of the op needs."""
        attrs = self.op.node_def.attr.items()
        return {k: v for k, v in attrs if k[0] != "_" or k == "_lower_using_switch_merge"}

    def copied(self, graph: Any, inputs: list[Any], name: str | None = None) -> list[Any]:
        """Add the same op to a graph, with other inputs; return its outputs."""
        dtypes = [t.dtype for t in self.op.outputs]
        new = graph._create_op_internal(
            self.type, inputs, dtypes, name=name, attrs=self.attributes, op_def=self.op.op_def
        )
        return list(new.outputs)

    @property
    def calls(self) -> bool:
        """Whether it runs another function."""
        return any(a.HasField("func") for a in self.op.node_def.attr.values())

    @property
    def is_whole(self) -> bool:
        """Whether rank 0 alone computes it."""
        return all(need == ROOT for need in self.needs)


def function_of(graph: Any, op: Any) -> Any:
    """Return the graph of the function that an op calls; None if there is none to be seen."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    return getattr(graph._get_function(op.get_attr("f").name), "graph", None)


def inlined(
    graph: Any, arguments: list[Value], place: Callable[[Any, Any, list[Value]], list[Value]]
) -> list[Value]:
    """Call ``place`` for each op, its graph and inputs; return the outputs. Calls are inlined."""
    found = {id(t): v for t, v in zip(graph.inputs, arguments, strict=True)}
    for op in in_order(graph):
        if op.type == "NoOp" or (op.outputs and all(id(t) in found for t in op.outputs)):
            continue
        values = [found[id(t)] for t in op.inputs]
        body = function_of(graph, op)
        if body is not None:
            # A gradient appends to the body what it needs of it; earlier calls do not return that.
            results = inlined(body, values, place)[: len(op.outputs)]
        elif op.type == "IdentityN" or (
            op.type == "Identity" and values[0].dtype.name == "variant"
        ):
            results = values
        else:
            results = place(op, graph, values)
        found.update({id(t): v for t, v in zip(op.outputs, results, strict=True)})
    return [found[id(t)] for t in graph.outputs]


def in_order(graph: Any) -> list[Any]:
    """Return the ops of a graph that have an effect, as they were made, each after its inputs."""
    needed = {t.op for t in graph.outputs}
    needed |= {op for op in graph.get_operations() if op.op_def.is_stateful}
    waiting = list(needed)
    while waiting:
        new = {t.op for t in waiting.pop().inputs} - needed
        needed |= new
        waiting += new
    done: dict[Any, None] = {}
    for op in graph.get_operations():
        waiting = [op] if op in needed else []
        while waiting:
            missing = [t.op for t in waiting[-1].inputs if t.op not in done]
            if missing:  # a loop gets more inputs when its gradient is made
                waiting += missing
            else:
                done[waiting.pop()] = None
    return list(done)
