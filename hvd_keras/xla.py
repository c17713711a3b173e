"""Collectives in functions that XLA compiles (``jit_compile=True``)."""

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs

from hvd_keras import _library


def problem() -> str:
    """Why models cannot be compiled by XLA with their collectives, in words; empty if they can."""
    return _library.why_no_xla()


def is_compiling() -> bool:
    """Whether what is being traced will be compiled by XLA.

    A ``tf.function`` without ``jit_compile`` of its own that was traced before it is called by one
    with it is not traced again, so nothing is known of that.
    """
    return not tf.executing_eagerly() and bool(
        control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def check(kind: str) -> None:
    """Raises NotImplementedError if the collective that is being traced cannot be compiled."""
    why = _library.why_no_xla()
    if why and is_compiling():
        raise NotImplementedError(
            f"hvd.{kind} cannot be compiled by XLA here: {why}. Use jit_compile=False, or, in "
            "model.fit, hvd.callbacks.BroadcastGlobalVariablesCallback, which sees to that."
        )


def function_of(graph: Any) -> Any:
    """The function that a loop's or branch's graph stands in; another graph itself."""
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph
