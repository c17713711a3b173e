"""From the gradients of one rank to the gradients of the whole batch.

``plan`` settles once, for a list of variables, how each one's gradient travels; ``exchange`` then
moves the gradients of every step in buckets, one request each.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from hvd_keras import agree, buckets, log, ops, settings
from hvd_keras._keras import Variable
from hvd_keras.compression import Compression, Compressor
from hvd_keras.process_sets import ProcessSet, global_process_set

Kind = Literal["dense", "sparse"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One variable, as all ranks must know it: by its place in the list and its path."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}{list(self.shape)}"


def entry(variable: Any) -> Entry:
    """Of a Keras variable, a ``tf.Variable`` or a tensor."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    # In TensorFlow 1 dimensions are objects of a class, and dtypes say "reference".
    shape = tuple(tf.TensorShape(variable.shape).as_list())
    return Entry(common_path(path), shape, tf.as_dtype(variable.dtype).base_dtype.name)


def key(variable: Any) -> int:
    """Tells variables apart; a Keras variable and the ``tf.Variable`` in it are one."""
    return id(variable.value if isinstance(variable, Variable) else variable)


def common_path(path: str) -> str:
    """Without the numbers of Keras, which counts layers of a name through a process's life."""
    return re.sub(r"(_\d+)?(:0)?(?=/|$)", "", path)


def size_in_bytes(e: Entry) -> int:
    """Of the variable's values."""
    return math.prod(e.shape) * int(tf.as_dtype(e.dtype).size)


@dataclasses.dataclass(frozen=True)
class Manner:
    """What the user chose about the exchange.

    Raises:
        ValueError: a choice is impossible, or contradicts another.
    """

    op: ops.ReduceOp = ops.Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    gradient_predivide_factor: float = 1.0
    scale_local_gradients: bool = True
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        self.process_set.check_included("DistributedOptimizer")
        if self.op not in (ops.Average, ops.Sum, ops.Adasum):
            raise ValueError(f"op is {self.op!r}, expected hvd.Average, hvd.Sum or hvd.Adasum.")
        if self.op is ops.Adasum and not self.sparse_as_dense:
            raise ValueError("op=hvd.Adasum needs dense gradients. Give sparse_as_dense=True, too.")
        if not (isinstance(self.compression, type) and issubclass(self.compression, Compressor)):
            raise ValueError(
                f"compression is {self.compression!r}, expected hvd.Compression.none, .fp16 or "
                ".bf16, or a class derived from hvd.Compressor."
            )
        if self.gradient_predivide_factor <= 0:
            raise ValueError(
                f"gradient_predivide_factor is {self.gradient_predivide_factor}, expected a number "
                "above 0."
            )
        if self.gradient_predivide_factor != 1.0 and self.op is not ops.Average:
            raise ValueError(
                "gradient_predivide_factor splits the division of an average; with op=hvd.Sum "
                "nothing is divided. Leave one of them out."
            )

    def scale_local(self, gradient: Any) -> Any:
        """Of a variable that stays on this rank."""
        if gradient is None or not self.scale_local_gradients:
            return gradient
        factor = tf.constant(1 / self.process_set.size(), gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values * factor, gradient.indices, gradient.dense_shape
            )
        return gradient * factor

    def densified(self, gradients: Sequence[Any]) -> list[Any]:
        """As dense tensors, if they shall be."""
        if not self.sparse_as_dense:
            return list(gradients)
        return [g if g is None else tf.convert_to_tensor(g) for g in gradients]


class Plan:
    """How the gradients of a list of variables travel, the same on all ranks.

    A gradient that is dense on any rank is dense on all; one that some ranks lack is zero there;
    one that no rank has stays None.

    Attributes:
        kinds: for each variable "dense", "sparse" or, if no rank has its gradient, None.
    """

    def __init__(
        self,
        name: str,
        entries: Sequence[Entry],
        gradients: Sequence[Any],
        groups: Sequence[Sequence[int]] = (),
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Compares notes with the other ranks of a process set.

        ``groups`` names variables, by place, that shall travel together.

        Raises:
            ValueError: the ranks' variables differ; on every rank.
        """
        self.name = name
        self.entries = tuple(entries)
        self.groups = [list(group) for group in groups]
        views = agree.gather_json(
            f"{name}.plan",
            [[str(e), _kind(g)] for e, g in zip(entries, gradients, strict=True)],
            process_set,
        )
        _check_equal(
            {
                rank: [text for text, _ in view]
                for rank, view in zip(process_set.ranks, views, strict=True)
            }
        )
        self.kinds = tuple(
            self._common_kind({view[i][1] for view in views}) for i in range(len(self.entries))
        )
        counts = collections.Counter(map(str, self.kinds))
        log.logger.debug("%s: gradients of %d variables: %s", name, len(entries), dict(counts))

    @staticmethod
    def _common_kind(kinds: set[Kind | None]) -> Kind | None:
        if "dense" in kinds:
            return "dense"
        return "sparse" if "sparse" in kinds else None

    def complete(self, gradients: Sequence[Any]) -> list[Any]:
        """This rank's gradients in the kinds of the plan.

        Raises:
            ValueError: a gradient appears that no rank had when the plan was made.
        """
        return [self._complete(i, gradient) for i, gradient in enumerate(gradients)]

    def _complete(self, i: int, gradient: Any) -> Any:
        kind, e = self.kinds[i], self.entries[i]
        if kind is None:
            if gradient is not None:
                raise ValueError(
                    f"{self.name}: variable {i}, {e}, has a gradient now, but had none on any rank "
                    "in the first step. Let the loss depend on it from the first step on, or make "
                    "a new optimizer when the model changes."
                )
            return None
        if gradient is None:
            if kind == "dense":
                return tf.zeros(e.shape, e.dtype)
            none = tf.zeros((0, *e.shape[1:]), e.dtype)
            return tf.IndexedSlices(none, tf.zeros(0, tf.int64), tf.constant(e.shape, tf.int64))
        if kind == "dense":
            return tf.convert_to_tensor(gradient)
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(gradient, tf.range(e.shape[0]))
        return tf.IndexedSlices(
            gradient.values, tf.cast(gradient.indices, tf.int64), tf.constant(e.shape, tf.int64)
        )

    def exchange(self, gradients: Sequence[Any], manner: Manner) -> list[Any]:
        """The gradients over all ranks, in the order given; None stays None.

        Last variables first, for backpropagation produces their gradients first. A bucket waits
        for the one before it, so that all ranks submit them in one order, even inside branches
        and loops, where TensorFlow itself keeps none.
        """
        results = list(gradients)
        previous: list[Any] = []
        for bucket in self._buckets(gradients):
            name = f"{self.name} gradients {bucket[-1]}-{bucket[0]}, {self.entries[bucket[0]].path}"
            with tf.control_dependencies(previous):
                reduced = ops.grouped_allreduce(
                    [gradients[i] for i in bucket],
                    op=manner.op,
                    compression=manner.compression,
                    device_dense=manner.device_dense,
                    device_sparse=manner.device_sparse,
                    prescale_factor=1 / manner.gradient_predivide_factor,
                    postscale_factor=manner.gradient_predivide_factor,
                    process_set=manner.process_set,
                    name=name,
                )
            for i, gradient in zip(bucket, reduced, strict=True):
                results[i] = gradient
            last = reduced[-1]
            previous = [last.values if isinstance(last, tf.IndexedSlices) else last]
        return results

    def _buckets(self, gradients: Sequence[Any]) -> list[list[int]]:
        present = [i for i in reversed(range(len(self.entries))) if gradients[i] is not None]
        grouped = {i for group in self.groups for i in group}
        chosen = [[i for i in group if gradients[i] is not None] for group in self.groups]
        chosen = [bucket for bucket in chosen if bucket]
        rest = [i for i in present if i not in grouped]
        sizes = [size_in_bytes(self.entries[i]) for i in rest]
        filled = buckets.fill(sizes, settings.read().bucket_bytes)
        return [*chosen, *([rest[k] for k in bucket] for bucket in filled)]


# How many requests, or lists of variables that shall share one.
Groups = int | Sequence[Sequence[Any]]


def groups(num_groups: int, groups: int | Sequence[Sequence[Any]] | None) -> Groups:
    """Horovod's two arguments as one.

    Raises:
        ValueError: both are given, or one is impossible.
    """
    if num_groups and groups is not None:
        raise ValueError(
            f"got both num_groups={num_groups} and groups={groups!r}. Give groups alone."
        )
    chosen = num_groups if groups is None else groups
    if isinstance(chosen, int):
        if chosen < 0:
            raise ValueError(
                f"groups is {chosen}, expected a number of requests, or 0 for by size."
            )
        return chosen
    if not all(isinstance(group, Sequence) for group in chosen):
        raise ValueError(f"groups is {groups!r}, expected an integer or lists of variables.")
    return chosen


def places(groups: Groups, variables: Sequence[Any]) -> list[list[int]]:
    """The groups as places in the list of variables."""
    if isinstance(groups, int):
        count = min(groups, len(variables))
        bounds = [len(variables) * g // count for g in range(count + 1)] if count else []
        return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    place = {key(v): i for i, v in enumerate(variables)}
    return [[place[key(v)] for v in group if key(v) in place] for group in groups]


class Distribution:
    """How the gradients of one optimizer become those of all ranks.

    Attributes:
        name: identifies the optimizer on all ranks.
        local: the variables whose gradients stay on this rank, see ``key``.
    """

    def __init__(self, name: str, manner: Manner, groups: Groups) -> None:
        self.name = name
        self.manner = manner
        self.groups = groups
        self.local: set[int] = set()
        self._plans: dict[tuple[Entry, ...], Plan] = {}

    def register_local_var(self, variable: Any) -> None:
        """Lets this variable's gradient stay on this rank."""
        self.local.add(key(variable))

    def plan(self, variables: Sequence[Any], gradients: Sequence[Any]) -> Plan:
        """Made when a list of variables is seen first.

        Raises:
            ValueError: the ranks' variables differ; on every rank.
        """
        entries = tuple(entry(v) for v in variables)
        if entries not in self._plans:
            self._plans[entries] = Plan(
                self.name,
                entries,
                gradients,
                places(self.groups, variables),
                self.manner.process_set,
            )
        return self._plans[entries]

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients over all ranks, in the order given; None where no rank has one.

        Raises:
            ValueError: the ranks' variables differ, on every rank; or a gradient appears that no
                rank had in the first step.
        """
        if self.manner.process_set.size() == 1 or len(variables) == 0:
            return list(gradients)
        results = self.manner.densified(gradients)
        shared = [i for i, v in enumerate(variables) if key(v) not in self.local]
        mine = [results[i] for i in shared]
        plan = self.plan([variables[i] for i in shared], mine)
        results = [self.manner.scale_local(gradient) for gradient in results]
        reduced = plan.exchange(plan.complete(mine), self.manner)
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return results


def _kind(gradient: Any) -> Kind | None:
    if gradient is None:
        return None
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _check_equal(views: dict[int, list[str]]) -> None:
    """``views`` are by rank."""
    if len({tuple(view) for view in views.values()}) == 1:
        return
    longest = max(map(len, views.values()))
    lines = []
    for i in range(longest):
        row = {r: view[i] if i < len(view) else "none" for r, view in views.items()}
        if len(set(row.values())) > 1:
            lines.append(f"variable {i}: " + ", ".join(f"rank {r} has {v}" for r, v in row.items()))
    shown = "\n  ".join(lines[:5]) + (f"\n  and {len(lines) - 5} more" if len(lines) > 5 else "")
    raise ValueError(
        f"The ranks train different models:\n  {shown}\n"
        "Every rank must build the same layers, with the same names, in the same order."
    )
