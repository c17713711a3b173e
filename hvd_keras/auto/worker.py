"""The loop of the ranks that run no script: they get functions and commands from the first rank."""

import dataclasses
import signal
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras.auto import messages
from hvd_keras.auto.messages import AGAIN, NEW, STOP, Collective
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides
    functions: list[tuple[Any, Sent]] = []
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
                sent = send()
                functions.append((_load(sent.graph), sent))
            else:
                function, sent = functions[number]
                function()
        except Exception as error:  # here or, in the middle of a step, elsewhere
            failure = messages.failure_of(error)
            if number == NEW:
                functions.append((None, sent))
            else:
                refusals = messages.Refusals(sent.collectives)


def _load(graph: bytes) -> Any:
    definition = tf.compat.v1.GraphDef.FromString(graph)
    return tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(definition, name="", return_elements=[f"{DONE}:0"]), []
    )
