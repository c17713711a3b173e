"""From the gradients of one rank to the gradients of the whole batch.

``plan`` settles once, for a list of variables, how each one's gradient travels; ``exchange`` then
moves the gradients of every step in buckets, one request each.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from hvd_keras import agree, ops, settings

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
    # Keras numbers layers of equal names through the process's life: dense, dense_1, …
    path = re.sub(r"(_\d+)?(:0)?(?=/|$)", "", path)
    return Entry(path, tuple(variable.shape), tf.as_dtype(variable.dtype).name)


def size_in_bytes(e: Entry) -> int:
    """Of the variable's values."""
    return math.prod(e.shape) * int(tf.as_dtype(e.dtype).size)


class Plan:
    """How the gradients of a list of variables travel, the same on all ranks.

    A gradient that is dense on any rank is dense on all; one that some ranks lack is zero there;
    one that no rank has stays None.

    Attributes:
        kinds: for each variable "dense", "sparse" or, if no rank has its gradient, None.
    """

    def __init__(self, name: str, entries: Sequence[Entry], gradients: Sequence[Any]) -> None:
        """Compares notes with the other ranks.

        Raises:
            ValueError: the ranks' variables differ; on every rank.
        """
        self.name = name
        self.entries = tuple(entries)
        views = agree.gather_json(
            f"{name}.plan",
            [[str(e), _kind(g)] for e, g in zip(entries, gradients, strict=True)],
        )
        _check_equal([[text for text, _ in view] for view in views])
        self.kinds = tuple(
            self._common_kind({view[i][1] for view in views}) for i in range(len(self.entries))
        )

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

    def exchange(self, gradients: Sequence[Any], op: ops.ReduceOp) -> list[Any]:
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
                reduced = ops.grouped_allreduce([gradients[i] for i in bucket], op=op, name=name)
            for i, gradient in zip(bucket, reduced, strict=True):
                results[i] = gradient
            last = reduced[-1]
            previous = [last.values if isinstance(last, tf.IndexedSlices) else last]
        return results

    def _buckets(self, gradients: Sequence[Any]) -> list[list[int]]:
        limit = settings.read().bucket_bytes
        buckets: list[list[int]] = []
        room = 0
        for i in reversed(range(len(self.entries))):
            if gradients[i] is None:
                continue
            size = size_in_bytes(self.entries[i])
            if not buckets or size > room:
                buckets.append([])
                room = limit
            buckets[-1].append(i)
            room -= size
        return buckets


def _kind(gradient: Any) -> Kind | None:
    if gradient is None:
        return None
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _check_equal(views: list[list[str]]) -> None:
    if all(view == views[0] for view in views):
        return
    longest = max(len(view) for view in views)
    lines = []
    for i in range(longest):
        row = [view[i] if i < len(view) else "none" for view in views]
        if len(set(row)) > 1:
            lines.append(
                f"variable {i}: " + ", ".join(f"rank {r} has {v}" for r, v in enumerate(row))
            )
    shown = "\n  ".join(lines[:5]) + (f"\n  and {len(lines) - 5} more" if len(lines) > 5 else "")
    raise ValueError(
        f"The ranks train different models:\n  {shown}\n"
        "Every rank must build the same layers, with the same names, in the same order."
    )
