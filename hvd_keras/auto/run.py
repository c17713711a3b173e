"""Divides functions that get a batch: plans them, sends the workers' part once, runs both parts."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from hvd_keras.auto import keep, messages, worker
from hvd_keras.auto.emit import Side
from hvd_keras.auto.pace import Pace
from hvd_keras.auto.places import SENT, UnknownError, WholeError
from hvd_keras.auto.plan import Plan
from hvd_keras.ops.validate import raw
from hvd_keras.runtime import log, rank_info

#: TensorFlow's own, as ``hook`` replaces it in the script.
function = tf.function

_MOST_TRACES = 16  # each takes seconds
# Held while the workers run or get a function. Another thread, or a Python function within a step,
# must not wait for it.
_busy = threading.Lock()


class Divided:
    """A function of the script, each batch of which all ranks share.

    It is traced once for each structure, dtype and inner shape of its arguments. Which axis is that
    of the rows is a guess, and any guess is right.
    """

    def __init__(self, body: Callable[..., Any], whole: Callable[..., Any], name: str) -> None:
        """``body`` is what is traced, ``whole`` computes the same on this rank alone."""
        self._body, self._whole, self.name = body, whole, name
        self._traces: dict[Any, Pace] = {}
        self._kept: list[Any] = []  # what the traces have captured, and what their keys name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        both: Any = (args, kwargs)
        leaves = [_tensor(x) for x in tf.nest.flatten(both)]
        args, kwargs = tf.nest.pack_sequence_as(both, leaves)
        if any(isinstance(x, (tf.Variable, tf.__internal__.CompositeTensor)) for x in leaves):
            self._tell("an argument is a variable, an iterator, or a ragged or sparse tensor")
            return self._whole(*args, **kwargs)
        if record.could_possibly_record():
            self._tell("a GradientTape around it needs its gradients")
            return self._whole(*args, **kwargs)
        tensors = [x for x in leaves if isinstance(x, tf.Tensor)]
        rows = _rows(tensors)
        if not rows or messages.is_over:
            return self._whole(*args, **kwargs)
        has = [_has(x, rows) for x in leaves]
        described = [_described(x, has_rows) for x, has_rows in zip(leaves, has, strict=True)]
        key = str(tf.nest.map_structure(lambda _: 0, both)), tuple(described), tuple(has)
        if not _busy.acquire(blocking=False):
            return self._whole(*args, **kwargs)
        try:
            if key not in self._traces:
                self._traces[key] = Pace(self.name)
                self._kept += [x for x in leaves if not isinstance(x, tf.Tensor)]
            whole = functools.partial(self._whole, *args, **kwargs)
            divide = functools.partial(self._divide, args, kwargs, rows)
            return self._traces[key].step(tensors, rows, whole, divide)
        finally:
            _busy.release()

    def _tell(self, why: str) -> None:
        log.warn_once(f"hvdrun --auto computes {self.name} on the first rank alone: {why}.")

    def _divide(self, args: Any, kwargs: Any, rows: int) -> Callable[..., Any] | None:
        """Return what runs this function divided; None if that is not possible."""
        if len(self._traces) > _MOST_TRACES:
            self._tell(f"its batches have more than {_MOST_TRACES} inner shapes")
            return None

        def spec(x: Any) -> Any:
            if not isinstance(x, tf.Tensor):
                return x
            return tf.TensorSpec([None, *x.shape[1:]] if _has(x, rows) else x.shape, x.dtype)

        try:
            traced = function(self._body, autograph=False).get_concrete_function(
                *tf.nest.map_structure(spec, args), **tf.nest.map_structure(spec, kwargs)
            )
        except Exception as error:  # what fails without a fixed number of rows may succeed with it
            self._tell(f"without a fixed number of rows it fails: {_first_line(error)}")
            return None
        try:
            plan, taken = planned(traced, rows)
            run = _build(plan, traced, taken)
        except (WholeError, UnknownError) as why:
            self._tell(str(why) or "a shape in it is unknown")
            return None
        except messages.LEFT:
            raise
        except Exception as error:  # nothing runs yet, so the function may stay as it is
            self._tell(f"it cannot be divided: {_first_line(error)}")
            return None
        if plan.whole:
            more = f" and {len(plan.whole) - 3} more" if len(plan.whole) > 3 else ""
            log.warn_once(
                f"hvdrun --auto computes on the first rank alone, in {self.name}: "
                f"{', '.join(plan.whole[:3])}{more}. They compare rows, or have no rule."
            )
        self._kept.append(traced)
        return run


def planned(traced: Any, rows: int) -> tuple[Plan, int]:
    """Return the plan of a traced function, and how many tensors it takes; or raise WholeError."""
    graph = traced.graph
    taken = len(graph.inputs) - len(traced.captured_inputs)
    divided = [
        i < taken and bool(t.shape.rank) and t.shape[0] is None and t.dtype.name in SENT
        for i, t in enumerate(graph.inputs)
    ]
    return Plan(graph, divided, traced.captured_inputs, rows), taken


def _build(plan: Plan, traced: Any, taken: int) -> Callable[[list[Any]], Any]:
    """Build the first rank's part of a planned function, and that of the others; send that."""
    graph, size, name = traced.graph, rank_info.size(), worker.next_name()
    with tf.Graph().as_default() as theirs:
        rank = tf.cast(raw.hvd_rank_info(what="rank"), tf.int64)
        Side(plan, name, rank, size, None).build()

    def compute(*leaves: Any) -> Any:
        side = Side(plan, name, 0, size, [*leaves, *traced.captured_inputs])
        found = {id(t): x for t, x in zip(graph.outputs, side.build(), strict=True)}
        return tf.nest.map_structure(
            lambda t: found.get(id(t), t), traced.structured_outputs, expand_composites=True
        )

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs[:taken]]
    mine = function(compute, autograph=False).get_concrete_function(*specs)
    both = worker.share(mine, theirs)
    kept = keep.Kept(plan.kept.values())

    def run(tensors: list[Any]) -> Any:
        kept.update()
        keep.forget(plan.assigned)
        return both(tensors)

    return run


def _tensor(x: Any) -> Any:
    """Return an argument as a function gets it: arrays are tensors, optional values None."""
    if isinstance(x, (np.ndarray, np.generic)):
        return tf.convert_to_tensor(x)
    return None if isinstance(x, tf.experimental.Optional) else x


def _described(x: Any, has_rows: bool) -> Any:
    """Return what a trace depends on."""
    if isinstance(x, tf.Tensor):
        return x.dtype, *x.shape[has_rows:]
    return (type(x), x) if isinstance(x, (int, float, str, bytes, type(None))) else id(x)


def _rows(tensors: list[Any]) -> int:
    """Return the number of rows: the first size that most of the tensors have; 0: not divisible."""
    found = [int(x.shape[0]) for x in tensors if x.shape.rank]
    rows = max(found, key=found.count, default=0)
    return rows if rows >= rank_info.size() else 0  # some ops of TensorFlow abort without any


def _has(x: Any, rows: int) -> bool:
    return isinstance(x, tf.Tensor) and bool(x.shape.rank) and x.shape[0] == rows


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"
