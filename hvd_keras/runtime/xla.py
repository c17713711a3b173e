"""Collectives in functions that XLA compiles (``jit_compile=True``)."""

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs

from hvd_keras.runtime import libraries


def problem() -> str:
    """Return why XLA cannot compile collectives here, or "" if it can."""
    return libraries.why_no_xla()


def is_compiling() -> bool:
    """Whether XLA will compile the function that is being traced.

    A plain ``tf.function`` that was traced before a compiled one calls it is not traced again, so
    it is not recognised.
    """
    return not tf.executing_eagerly() and bool(
        control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def check(kind: str) -> None:
    """Raise NotImplementedError if the collective that is being traced cannot be compiled."""
    why = libraries.why_no_xla()
    if why and is_compiling():
        raise NotImplementedError(
            f"XLA cannot compile hvd.{kind} here: {why}. Use jit_compile=False. In model.fit, "
            "hvd.callbacks.BroadcastGlobalVariablesCallback turns XLA off."
        )


def function_of(graph: Any) -> Any:
    """Return the function that contains a loop's or branch's graph; other graphs unchanged."""
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph
