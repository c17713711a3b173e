"""The ``fit`` that runs, on every backend of Keras."""

import contextlib
import contextvars
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hvd_keras.data.sources import Passes
from hvd_keras.gradients.values import Values
from hvd_keras.runtime.process_sets import ProcessSet


class Backend(Protocol):
    """What ``fit`` and ``evaluate`` need of a backend of Keras: a module with these functions.

    They are ``patches.fit_on_tensorflow`` and ``torch.fitting``. ``source`` is what ``fit`` reads.
    """

    def check(self, model: Any) -> None:
        """Raise ValueError if several ranks cannot train a model."""

    def synchronize(self, model: Any, process_set: ProcessSet) -> None:
        """Let batch normalisation have the statistics of the ranks that train a model."""

    def prepare(self, own: "Fit", source: Any) -> None:
        """Create the variables of a model, and find the passes over its data."""

    def build_step(self, own: "Fit") -> None:
        """Create the variables that Keras's own step makes, so that it is traced once."""

    def build_metrics(self, own: "Fit") -> None:
        """Create the variables of metrics, as the first step would."""

    def weighed(
        self, model: Any, process_set: ProcessSet, averages: bool, method: str
    ) -> AbstractContextManager[None]:
        """Weigh the losses of a model's steps: of ``method``, train_step or test_step."""

    def weigh_classes(self, arguments: dict[str, Any]) -> None:
        """Let ``class_weight`` of ``fit`` multiply the weights of ``uneven="pad"``."""

    def passes_of(self, source: Any) -> list[Passes]:
        """Return the passes over all sharded sources that data are made of."""

    def repeats(self, source: Any) -> bool:
        """Whether a pass over data may have several over a sharded source."""

    def repeated(self, source: Any) -> Passes | None:
        """Return the passes over a sharded source that is repeated, if it is the only one."""

    def rows_in_steps(self, source: Any) -> Any:
        """Describe how many rows each step has; None: that is unknown."""

    def logs_by_steps(self, model: Any) -> bool:
        """Whether Keras logs losses of outputs without knowing the numbers of rows."""

    def can_look_at(self, source: Any) -> bool:
        """Whether ``pass_first_batch`` can pass the batches of data."""

    def pass_first_batch(self, model: Any, look: Callable[[Any], None]) -> None:
        """Let a function see the first batch that the next step gets; None: there is none."""

    def validate_together(self, everywhere: bool) -> None:
        """Set whether all ranks take the next steps of validation."""

    def gpu_bytes(self) -> int | None:
        """Return how much memory of its GPU is in use; None without a GPU."""


@dataclasses.dataclass
class Fit:
    """A running ``fit`` on the ranks of a process set, and what their callbacks have in common."""

    model: Any
    callbacks: list[Any]  # this rank's, as given
    arguments: dict[str, Any]  # the others of ``fit``
    process_set: ProcessSet
    backend: Backend
    has_begun: bool = False  # the ranks have compared what must be equal
    # Over the sharded sources of its data, if epochs are whole passes, or passes follow for ever.
    passes: Sequence[Passes] = ()
    seekable: Any = None  # the same, if they can continue at any row
    begins_anew: bool = False  # a restart reads its data from the first pass on
    iterator: Any = None  # Keras's, over the batches of each epoch
    dataset: Any = None  # over which it iterates
    source: Any = None  # describes the rows that its data are made of, in whatever order
    rows: int | None = None  # of each of this rank's batches, if known
    caches: Sequence[Sequence[str]] = ()  # the hosts and names of files with rows of this rank
    problem: Exception | None = None  # of this rank's model, which could not be traced
    unbuilt: str = ""  # which ranks' models have no variables, and why
    mixes: str = ""  # what in the model sees other rows of the batch, and how
    constants: Any = None  # hashes and texts of those in what it trains by, if known
    # Of each part of the callbacks: what those of any rank decide by; a rank has TerminateOnNaN.
    monitored: Sequence[Sequence[str]] = ()
    ends_on_nan: Sequence[bool] = ()
    names: Sequence[Sequence[str]] = ()  # of the callbacks' classes, by rank
    # All ranks have the same ModelCheckpoint, and so can wait for each other there.
    waits_for_checkpoints: bool = False
    looks_at_data: bool = False  # the first batch of each rank can be compared
    validates: bool = False  # all ranks validate after the same epochs, and average their metrics
    values: Values | None = None  # of the model, to be compared
    stopped: str = ""  # why the epoch ends here before its last step, as far as is known
    restored: bool = False  # it began with a checkpoint, which nothing may overwrite
    # Of the next train_step, or trace of one: the same on all ranks.
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def agree(self, gathered: Sequence[dict[str, Any]]) -> None:
        """Learn from what ``describe`` returned on all ranks."""
        parts = zip(*(theirs["monitored"] for theirs in gathered), strict=True)
        self.monitored = [sorted({name for theirs in part for name in theirs}) for part in parts]
        self.names = [theirs["callbacks"] for theirs in gathered]
        ends = zip(*(theirs["ends on NaN"] for theirs in gathered), strict=True)
        self.ends_on_nan = [any(part) for part in ends]
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
    backend: Backend
    is_together: bool = False  # each of their steps is one of all


#: The validation that runs.
validation: contextvars.ContextVar[Validation | None] = contextvars.ContextVar(
    "validation", default=None
)
#: Whether an ``evaluate`` runs within another one.
is_apart = contextvars.ContextVar("evaluate within another", default=False)
#: Models whose validation needs the numbers of all ranks.
weighed: weakref.WeakSet[Any] = weakref.WeakSet()
#: Models whose ranks' batches may have different numbers of rows, which training counts.
counting_rows: weakref.WeakSet[Any] = weakref.WeakSet()


def running(model: Any) -> Fit | None:
    """The ``fit`` that trains a model now; None if there is none, or this rank trains it alone."""
    own = current.get()
    return own if own is not None and own.model is model else None


def next_number(outside: Iterator[int], method: str) -> int:
    """The number of the next step, or trace of one; ``outside`` counts those outside of fit."""
    own = current.get() if method == "train_step" else None  # ranks may validate by themselves
    return next(outside if own is None else own.numbers)


def trace_anew(model: Any) -> None:
    """Let a model's next step be traced anew, within ``fit``, too."""
    model.train_function = None
    made = model.make_train_function()
    if made is not None:  # tf_keras
        model.train_function = made


@dataclasses.dataclass(frozen=True)
class Weighing:
    """The losses of a model that several ranks train."""

    model: Any
    process_set: ProcessSet
    averages: bool  # gradients are averaged, not summed
    validates: bool

    def is_exact(self) -> bool:
        """Whether all ranks take this step."""
        own = validation.get()
        return not self.validates or bool(own and own.is_together)

    def counts_rows(self) -> bool:
        """Whether the ranks may train on different numbers of rows."""
        counts = self.model in counting_rows or running(self.model) is None
        return counts and self.averages and not self.validates


# The threads in which ranks of a process set run fit, by its id.
_threads: dict[int, int] = {}


@contextlib.contextmanager
def in_one_thread(process_set: ProcessSet) -> Iterator[None]:
    """Let no other thread train a model on these ranks meanwhile.

    Raises RuntimeError if one does: each rank runs threads in an order of its own, so requests of
    two models would meet.
    """
    number, mine = process_set.id(), threading.get_ident()
    is_within = _threads.get(number) == mine
    if _threads.setdefault(number, mine) != mine:
        raise RuntimeError(
            f"fit: another thread trains a model on {process_set}, and the requests of both would "
            "meet. Train one after the other, or each on a process set of its own."
        )
    try:
        yield
    finally:
        if not is_within:
            del _threads[number]


def count_rows(model: Any, counts: bool) -> None:
    """Set whether a model's steps count rows; one that was traced otherwise is traced anew."""
    if counts != (model in counting_rows):
        (counting_rows.add if counts else counting_rows.discard)(model)
        trace_anew(model)


def step() -> int:
    """How many steps the ``fit`` that runs has made; 0 outside of one."""
    own = current.get()
    return 0 if own is None or own.values is None else own.values.steps


#: Up to which a constant divisor is hardly a number of rows.
FEW = 4


def may_be_number_of_rows(ranks: int, number: float, rows: int | None = None) -> bool:
    """Whether a number may be that of a rank's rows in the step that runs, times something.

    The number of rows of all ranks does not count. ``rows``: of this rank, if the caller knows it.
    """
    own = current.get()
    rows = rows or (own.rows if own is not None else None)
    return rows is None or (number % rows == 0 and not (number == rows * ranks > FEW))


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
