"""Functions and commands go from the first rank to the others, which run no script but a loop."""

import signal
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.auto import messages
from hvd_keras.auto.messages import AGAIN, NEW, STOP, Requests
from hvd_keras.auto.places import WholeError
from hvd_keras.runtime import objects

_DONE = "done"  # the op that needs all requests
_count = 0  # functions that the others have got
_over: list[int] = []  # those that are gone here, but not there


def next_name() -> str:
    """Return a name for the next function that is shared."""
    return f"auto.{_count}"


def share(mine: Any, theirs: tf.Graph) -> Callable[[list[Any]], Any]:
    """On the first rank: send the others' part of a function; return what runs both."""
    global _count
    graph, requests = finished(theirs)
    number, _count = _count, _count + 1

    def run(tensors: list[Any]) -> Any:
        with messages.uninterrupted():
            try:
                messages.command(number)
                return mine(*tensors)
            except BaseException as error:
                found = messages.cancel(requests, error)
                if found is error:
                    raise
                raise found from None

    weakref.finalize(run, _over.append, number)
    with messages.uninterrupted():
        messages.command(NEW)
        gone = [_over.pop() for _ in range(len(_over))]
        objects.broadcast_object((graph, requests, gone), name="auto.function")
        if failures := messages.command(AGAIN):
            raise WholeError("rank {rank} cannot load it: {text}".format(**failures[0]))
    return run


def finished(graph: tf.Graph) -> tuple[bytes, Requests]:
    """Return a graph in binary form, once all its ops are there, and the requests that it makes."""
    ops = [op for op in graph.get_operations() if op.op_def.is_stateful]
    with graph.as_default(), tf.control_dependencies(ops):
        tf.constant(0, name=_DONE)
    named = [op for op in ops if "tensor_name" in op.node_def.attr]
    requests = [(op.type[3:].lower(), op.get_attr("tensor_name").decode()) for op in named]
    return graph.as_graph_def().SerializeToString(), requests


def work() -> None:
    """Run what the first rank commands, until it stops."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides
    functions: list[tuple[Any, Requests]] = []
    refusals: messages.Refusals | None = None
    failure: messages.Failure | None = None
    while True:
        number, failures = messages.turn(failure=failure)
        if refusals is not None:
            refusals.end()
        refusals = failure = None
        if failures or number == AGAIN:
            continue
        if number == STOP:
            return
        try:
            if number == NEW:
                functions.append((None, ()))
                graph, requests, gone = objects.broadcast_object(None, name="auto.function")
                for one in gone:
                    functions[one] = None, ()
                functions[-1] = loaded(graph), requests
            else:
                functions[number][0]()
        except Exception as error:  # here or, in the middle of a step, elsewhere
            failure = messages.failure_of(error)
            if number != NEW:
                refusals = messages.Refusals(functions[number][1])


def loaded(graph: bytes) -> Any:
    """Return a function that runs a graph that was sent."""
    definition = tf.compat.v1.GraphDef.FromString(graph)
    return tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(definition, name="", return_elements=[f"{_DONE}:0"]), []
    )
