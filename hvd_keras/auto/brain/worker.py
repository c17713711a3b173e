"""The loop of the ranks that run no script: they get functions and commands from the first rank."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras.auto.brain import messages
from hvd_keras.auto.brain.messages import CANCEL, NEW, STOP, Collective
from hvd_keras.runtime import objects

DONE = "done"  # the op that needs all others


@dataclasses.dataclass(frozen=True)
class Sent:
    """A function as it is sent: a graph in binary form, and the requests that it makes."""

    graph: bytes
    collectives: Sequence[Collective]


def send(function: Sent | None = None) -> Sent:
    """Send a function to all other ranks, or get one there."""
    found: Sent = objects.broadcast_object(function, 0, name="auto.function")
    return found


def work() -> None:
    """Run what the first rank commands, until it stops."""
    functions: list[tuple[Any, Sent]] = []
    refusals: messages.Refusals | None = None
    error: Exception | None = None
    while (number := messages.command()) != STOP:
        if number == NEW:
            sent = send()
            functions.append((_load(sent.graph), sent))
        elif number == CANCEL:
            if refusals is not None:
                refusals.end()
            messages.share_error(error)
            refusals, error = None, None
        else:
            function, sent = functions[number]
            try:
                function()
            except tf.errors.OpError as failure:  # here or, in the middle of a step, elsewhere
                refusals, error = messages.Refusals(sent.collectives), failure


def _load(graph: bytes) -> Any:
    definition = tf.compat.v1.GraphDef.FromString(graph)
    return tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(definition, name="", return_elements=[f"{DONE}:0"]), []
    )
