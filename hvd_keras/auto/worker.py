"""Functions and commands go from the first rank to the others, which run no script but a loop."""

import signal
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.auto import messages
from hvd_keras.auto.messages import AGAIN, NEW, STOP, Requests
from hvd_keras.auto.places import WholeError
from hvd_keras.runtime import objects

_DONE = "done"  # the op that needs all requests
_count = 0  # functions that the others have got

#: A graph in binary form, and the requests that it makes.
Sent = tuple[bytes, Requests]


def next_name() -> str:
    """Return a name for the next function that is shared."""
    return f"auto.{_count}"


def share(mine: Any, theirs: tf.Graph) -> Callable[[list[Any]], Any]:
    """On the first rank: send the others' part of a function; return what runs both."""
    global _count
    sent = finished(theirs)
    with messages.uninterrupted():
        messages.command(NEW)
        objects.broadcast_object(sent, name="auto.function")
        number, _count = _count, _count + 1
        if failures := messages.command(AGAIN):
            raise WholeError("rank {rank} cannot load it: {text}".format(**failures[0]))

    def run(tensors: list[Any]) -> Any:
        with messages.uninterrupted():
            try:
                messages.command(number)
                return mine(*tensors)
            except BaseException as error:
                found = messages.cancel(sent[1], error)
                if found is error:
                    raise
                raise found from None

    return run


def finished(graph: tf.Graph) -> Sent:
    """Return a graph as it is sent, once all its ops are there."""
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
                graph, requests = objects.broadcast_object(None, name="auto.function")
                functions.append((loaded(graph), requests))
            else:
                function, requests = functions[number]
                function()
        except Exception as error:  # here or, in the middle of a step, elsewhere
            failure = messages.failure_of(error)
            if number == NEW:
                functions.append((None, requests))
            else:
                refusals = messages.Refusals(requests)


def loaded(graph: bytes) -> Any:
    """Return a function that runs a graph that was sent."""
    definition = tf.compat.v1.GraphDef.FromString(graph)
    return tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(definition, name="", return_elements=[f"{_DONE}:0"]), []
    )
