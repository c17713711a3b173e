"""The ``fit`` that runs, on every backend of Keras."""

import contextvars
import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_keras.rows.sources import Passes
from hvd_keras.runtime.process_sets import ProcessSet

if TYPE_CHECKING:
    from hvd_keras.hooks.values import Values


@dataclasses.dataclass
class Fit:
    """A running ``fit`` on the ranks of a process set, and what their callbacks have in common."""

    model: Any
    callbacks: list[Any]  # this rank's, as given
    arguments: dict[str, Any]  # the others of ``fit``
    process_set: ProcessSet
    backend: Any  # what depends on Keras's, see ``tensorflow_fits``
    has_begun: bool = False  # the ranks have compared what must be equal
    passes: Sequence[Passes] = ()  # over the sharded sources of its data, if epochs are whole ones
    goes_on: bool = False  # an epoch begins within a pass over sharded data, where the last ended
    seekable: Any = None  # the same, if they can continue at any row
    position: Any = None  # in data that cannot, if it can be saved
    iterator: Any = None  # Keras's, over the batches of each epoch
    dataset: Any = None  # over which it iterates
    problem: Exception | None = None  # of this rank's model, which could not be traced
    unbuilt: str = ""  # which ranks' models have no variables, and why
    mixes: str = ""  # a layer that computes a row from other rows of the batch
    monitored: Sequence[str] = ()  # what callbacks of any rank decide by
    ends_on_nan: bool = False  # a rank has TerminateOnNaN
    # All ranks have the same ModelCheckpoint, and so can wait for each other there.
    waits_for_checkpoints: bool = False
    looks_at_data: bool = False  # the first batch of each rank can be compared
    validates: bool = False  # all ranks validate after the same epochs, and average their metrics
    values: "Values | None" = None  # of the model, to be compared
    restored: bool = False  # it began with a checkpoint, which nothing may overwrite

    def agree(self, gathered: Sequence[dict[str, Any]]) -> None:
        """Learn from what ``describe`` returned on all ranks."""
        self.monitored = sorted({name for theirs in gathered for name in theirs["monitored"]})
        self.ends_on_nan = any(theirs["ends on NaN"] for theirs in gathered)
        self.waits_for_checkpoints = all(
            theirs["checkpoints"] == gathered[0]["checkpoints"] for theirs in gathered
        )
        self.looks_at_data = all(theirs["looks at data"] for theirs in gathered)
        every = gathered[0]["validates every"]
        self.validates = bool(every) and all(t["validates every"] == every for t in gathered)


#: The ``fit`` that runs.
current: contextvars.ContextVar[Fit | None] = contextvars.ContextVar("fit", default=None)


@dataclasses.dataclass
class Validation:
    """An ``evaluate`` that all ranks call, perhaps in ``fit``."""

    model: Any
    process_set: ProcessSet
    backend: Any
    is_together: bool = False  # each of their steps is one of all


#: The validation that runs.
validation: contextvars.ContextVar[Validation | None] = contextvars.ContextVar(
    "validation", default=None
)
#: Models whose validation needs the numbers of all ranks.
weighed: weakref.WeakSet[Any] = weakref.WeakSet()
#: Models whose ranks' batches may have different numbers of rows, which training counts.
counting_rows: weakref.WeakSet[Any] = weakref.WeakSet()


def running(model: Any) -> Fit | None:
    """The ``fit`` that trains a model now; None if there is none, or this rank trains it alone."""
    own = current.get()
    return own if own is not None and own.model is model else None


def check_built(model: Any) -> None:
    """Check, for a callback, that the model has its variables.

    Raises:
        ValueError: (on every rank) a rank could not create them before the first step.
    """
    if (own := running(model)) and own.unbuilt:
        raise ValueError(
            f"model {model.name!r} has no variables yet, and its training step cannot be traced to "
            f"create them: {own.unbuilt}. Give the model an Input, or call it once on a batch, "
            "before fit."
        ) from own.problem
