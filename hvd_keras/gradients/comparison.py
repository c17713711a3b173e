"""Compares the weights that a custom loop trains, before some of its steps."""

import collections
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.gradients import model_ranks, shards
from hvd_keras.gradients.values import Values
from hvd_keras.ops.validate import is_compiling
from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet

#: After ``hvd.join`` the ranks have made different numbers of steps.
comparisons: weakref.WeakSet["Comparison"] = weakref.WeakSet()


class Comparison:
    """Compares, before some steps of a custom loop, the weights that it trains.

    Not in what XLA compiles, which cannot call Python.
    """

    def __init__(self, variables: Sequence[Any], process_set: ProcessSet, name: str) -> None:
        loop = f"loop {next(_loops[process_set, name])} of {name}"  # the same on all ranks
        self._values = Values(variables, process_set, loop=loop)
        self._left = ""  # of a graph's counter of the steps until the next comparison, the name
        comparisons.add(self)

    def step(self) -> None:
        """Compare in a step, or add that to its graph."""
        if tf.executing_eagerly():
            self._values.check("step")
            return
        if not tf.inside_function() or is_compiling():
            return
        if not self._left:
            self._left = f"hvd_keras comparison {next(_numbers)}"
            with tf.init_scope():
                _assign(self._left, 0)
                _assign(_TURN, 0)
        is_alone = model_ranks.alone.get()  # TensorFlow calls Python on threads of its own
        # By name: a graph that has captured a handle cannot be saved with its module.
        steps, turn = _handle(self._left), _handle(_TURN)
        tf.raw_ops.AssignSubVariableOp(resource=steps, value=tf.constant(1, tf.int64))
        left = tf.raw_ops.ReadVariableOp(resource=steps, dtype=tf.int64)

        def compare() -> tf.Tensor:
            # Reads of the handles, after and before which TensorFlow assigns; the values are read
            # in Python.
            handles = [shards.inner_variable(v).handle for v in self._values.variables]
            with tf.control_dependencies([tf.raw_ops.VariableShape(input=h) for h in handles]):
                left = tf.numpy_function(
                    lambda: self._compare(is_alone), [], tf.int64, name="hvd_keras_compare"
                )
            tf.raw_ops.AssignVariableOp(resource=steps, value=left)
            # Comparisons of one graph take turns, the same on all ranks: each occupies a thread.
            tf.raw_ops.AssignVariableOp(resource=turn, value=left)
            return left

        tf.cond(left < 0, compare, lambda: left)

    def _compare(self, is_alone: bool) -> np.int64:
        values = self._values
        if values.steps:  # the first one begins to measure
            values.steps = values.next - 1
        with agree.within(model_ranks.alone, is_alone):
            values.check("step")
        return np.int64(_NEVER if values.reported else values.next - values.steps - 1)

    def restart(self) -> None:
        """Compare as if the loop began. Not in a graph."""
        self._values.restart()
        if self._left:
            _assign(self._left, 0)


_NEVER = 1 << 62
_numbers = itertools.count()
_TURN = "hvd_keras comparisons"
_loops: dict[Any, Iterator[int]] = collections.defaultdict(itertools.count)


def _handle(name: str) -> Any:
    # One in each graph: by it TensorFlow knows in which order operations must run.
    handles: dict[str, Any] = {}
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        handles = graph._hvd_handles = getattr(graph, "_hvd_handles", handles)
    if name not in handles:
        with tf.device("CPU:0"):
            handles[name] = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name)
    return handles[name]


def _assign(name: str, value: int) -> None:
    with tf.device("CPU:0"):
        number = tf.constant(value, tf.int64)
        tf.raw_ops.AssignVariableOp(resource=_handle(name), value=number)


def restart_all() -> None:
    """Begin all comparisons anew, when this is run."""

    def restart() -> np.int32:
        for comparison in list(comparisons):
            comparison.restart()
        return np.int32(0)

    if tf.executing_eagerly():
        restart()
    elif tf.inside_function():
        tf.numpy_function(restart, [], tf.int32)
