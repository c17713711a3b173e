"""``tf.random`` in a step: drawn by ops whose state is a variable, with the same numbers.

TensorFlow's own random ops keep their state in one trace of a function, on one rank. A divided step
goes on where the first rank's own steps have stopped, which a variable tells both. The numbers are
those of TensorFlow's kernels (``GuardedPhiloxRandom``): a key and a counter made of the two seeds,
and 256 of the generator's blocks reserved for each number.
"""

import contextvars
import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import gen_random_ops, resource_variable_ops
from tensorflow.python.ops import gen_stateless_random_ops_v2 as stateless_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

_PHILOX = 1
_RESERVED = 256


_living: weakref.WeakSet[Any] = weakref.WeakSet()


class Draws:
    """What the random ops of a function share in all its traces, in the order of the ops."""

    def __init__(self) -> None:
        _living.add(self)
        self._states: list[tuple[Any, int, int]] = []
        self._seeded: list[Any] = []  # those of ops whose numbers can be had again
        self._next = 0
        self._trace: Any = None  # a weak reference to its graph

    def restart(self) -> None:
        """Draw from the beginning."""
        for reserved in self._seeded:
            reserved.assign(0)

    def __bool__(self) -> bool:
        return bool(self._states)

    def state(self, seeds: tuple[int, int]) -> tuple[Any, int, int]:
        """Return how many blocks the next op has reserved, a variable, and its seeds."""
        graph = _graph()
        if self._trace is None or self._trace() is not graph:
            self._trace, self._next = weakref.ref(graph), 0
        if self._next == len(self._states):
            is_seeded = seeds != (0, 0)
            if not is_seeded:
                first, second = np.frombuffer(os.urandom(16), np.int64)
                seeds = int(first), int(second)
            with tf.init_scope():  # tf.Variable would be one that the tf.function must make
                reserved = resource_variable_ops.ResourceVariable(
                    0, trainable=False, dtype=tf.int64, name="hvd_random"
                )
            self._states.append((reserved, *seeds))
            self._seeded += [reserved] * is_seeded
        self._next += 1
        return self._states[self._next - 1]


def _graph() -> Any:
    """The graph of the function that is traced, also within its loops and branches."""
    graph: Any = tf.compat.v1.get_default_graph()
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def _is_of_trace() -> bool:
    """Whether an op is made for the function itself.

    Others that it calls, which have traces of their own, and datasets draw as TensorFlow does; so
    does ``tf.vectorized_map``, which would repeat what has no state.
    """
    if not tf.inside_function() or isinstance(_graph().outer_graph, FuncGraph):
        return False
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith("parallel_for.control_flow_ops"):
            return False
        frame = frame.f_back
    return True


#: Those of the function that is being called; None: TensorFlow draws.
current: contextvars.ContextVar[Draws | None] = contextvars.ContextVar("draws", default=None)


def _draw(
    stateless: Callable[..., Any],
    stateful: Callable[..., Any],
    shape: Any,
    *how: Any,
    seed: int = 0,
    seed2: int = 0,
    name: str | None = None,
    **more: Any,
) -> Any:
    """Replace a random op of TensorFlow."""
    draws = current.get()
    if draws is None or not _is_of_trace():
        return stateful(shape, *how, seed=seed, seed2=seed2, name=name, **more)
    reserved, *seeds = draws.state((int(seed or 0), int(seed2 or 0)))
    key, high = (tf.constant(number, tf.int64) for number in seeds)
    counter = tf.bitcast(tf.stack([reserved, high]), tf.uint64)
    numbers = stateless(
        shape, tf.bitcast(key[None], tf.uint64), counter, tf.constant(_PHILOX), *how, **more
    )
    count = tf.reduce_prod(tf.cast(shape, tf.int64))
    reserved.assign_add(_RESERVED * count, read_value=False)
    return numbers


def _set_seed(set_seed: Callable[[int], None], seed: int) -> None:
    """Replace ``tf.random.set_seed``, which also restarts all random ops."""
    set_seed(seed)
    for draws in list(_living):
        draws.restart()


#: What ``replace`` puts in the place of functions of TensorFlow.
replacements: list[tuple[Any, str, Callable[..., Any]]] = [
    (tf.random, "set_seed", _set_seed),
    *(
        (gen_random_ops, name, functools.partial(_draw, stateless))
        for name, stateless in (
            ("random_standard_normal", stateless_ops.stateless_random_normal_v2),
            ("random_uniform", stateless_ops.stateless_random_uniform_v2),
            ("truncated_normal", stateless_ops.stateless_truncated_normal_v2),
            ("random_uniform_int", stateless_ops.stateless_random_uniform_int_v2),
        )
    ),
]
