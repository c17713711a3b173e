"""Divides functions that get a batch: plans them, sends the workers' part once, runs both parts."""

import contextlib
import contextvars
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from hvd_keras.auto import check, draws, keep, messages, worker
from hvd_keras.auto.emit import Side
from hvd_keras.auto.pace import Pace
from hvd_keras.auto.places import SENT, UnknownError, WholeError
from hvd_keras.auto.plan import Plan
from hvd_keras.ops.validate import raw
from hvd_keras.runtime import agree, log, rank_info
from hvd_keras.saving import per_rank
from hvd_keras.training.row_trials import nodes_of

#: TensorFlow's own, as ``hook`` replaces it in the script.
function = tf.function

#: Whether a function is being traced again, for any number of rows.
is_again = contextvars.ContextVar("traced again", default=False)
_MOST_TRACES = 16  # each takes seconds
# Held while the workers run or get a function. Another thread, or a Python function within a step,
# must not wait for it.
_busy = threading.Lock()

Way = Callable[[list[Any]], Any]
Whole = Callable[[], Any]


class _Kind:
    """Batches of one structure and of the same dtypes and inner shapes."""

    def __init__(self, name: str, shapes: Any, drawn: draws.Draws) -> None:
        self.pace, self.shapes, self.draws = Pace(name), shapes, drawn
        self.random = per_rank.random_state()  # before the first trace


class Divided:
    """A ``tf.function``, each batch of which all ranks share.

    One process traces it for each shape, most often with a number of rows. If so, it is traced once
    more, for any number; and all that it computes then is compared with what it should be.
    """

    def __init__(self, traced: Any, whole: Callable[..., Any], name: str) -> None:
        """``whole`` calls ``traced``, a tf.function."""
        self._traced, self._whole, self.name = traced, whole, name
        self._kinds: dict[Any, _Kind] = {}
        self._draws: dict[str, draws.Draws] = {}  # by key, see ``step``
        self._of: dict[str, Any] = {}  # what ``trace`` has made
        self._spec: tuple[Any, str] = None, ""  # what ``trace`` was given last, and has returned
        self._built: dict[Any, tuple[Way, Any] | None] = {}  # by trace and inner shapes
        self._kept: list[Any] = []  # what keys name
        self._is_other = False  # divided, it computes something else
        self._has_xla = getattr(traced, "_jit_compile", None)  # which draws by itself

    def trace(self, spec: Any) -> str:
        """Trace it for all batches that ``spec`` describes, as Keras does; return a key of that."""
        if self._spec[0] is not spec:
            given = tf.nest.map_structure(
                lambda one: None if isinstance(one, tf.OptionalSpec) else one, spec
            )
            self._spec = spec, repr(given)
            if self._spec[1] not in self._draws:
                drawn = self._draws[self._spec[1]] = draws.Draws()
                with self._drawing(drawn):
                    self._of[self._spec[1]] = self._traced.get_concrete_function(given)
        return self._spec[1]

    def _drawing(self, drawn: draws.Draws) -> contextlib.AbstractContextManager[None]:
        return agree.within(draws.current, None if self._has_xla else drawn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # That has one trace for any number of rows.
        is_free = getattr(self._traced, "input_signature", None) is not None
        return self.step("input_signature" * is_free, *args, **kwargs)

    def step(self, of: str, *args: Any, **kwargs: Any) -> Any:
        """Call it with a batch; ``of`` is a key of its one trace for all such batches, or ""."""
        given = self._bound(args, kwargs)
        leaves = [_tensor(x) for x in tf.nest.flatten(given)]
        if any(isinstance(x, (tf.Variable, tf.__internal__.CompositeTensor)) for x in leaves):
            self._tell("an argument is a variable, an iterator, or a ragged or sparse tensor")
            return self._whole(*args, **kwargs)
        if record.could_possibly_record():
            self._tell("a GradientTape around it needs its gradients")
            return self._whole(*args, **kwargs)
        tensors = [x for x in leaves if isinstance(x, tf.Tensor)]
        rows = _rows(tensors)
        if not rows or messages.is_over or not _busy.acquire(blocking=False):
            return self._whole(*args, **kwargs)
        try:
            has = [_has(x, rows) for x in leaves]
            described = [_described(x, has_rows) for x, has_rows in zip(leaves, has, strict=True)]
            shapes = str(tf.nest.map_structure(lambda _: 0, given)), *described, *has
            key = of or rows, shapes
            if key not in self._kinds:
                if len(self._kinds) == _MOST_TRACES:
                    self._tell(f"its batches have more than {_MOST_TRACES} shapes")
                    return self._whole(*args, **kwargs)
                drawn = self._draws.setdefault(of, draws.Draws()) if of else draws.Draws()
                self._kinds[key] = _Kind(self.name, shapes, drawn)
                self._kept += [x for x in leaves if not isinstance(x, tf.Tensor)]
            kind = self._kinds[key]

            def whole() -> Any:
                with self._drawing(kind.draws):
                    return self._of.get(of, self._whole)(*args, **kwargs)

            def divide() -> tuple[Way | None, Any]:
                alone = self._of.get(of)
                if alone is None:
                    with self._drawing(kind.draws):
                        alone = self._traced.get_concrete_function(*args, **kwargs)
                call = tf.nest.pack_sequence_as(given, leaves)
                return self._divide(alone, call, tensors, rows, kind, whole)

            if self._is_other:
                return whole()
            return kind.pace.step(tensors, rows, whole, divide)
        finally:
            _busy.release()

    def _bound(self, args: Any, kwargs: Any) -> Any:
        """Return arguments in the order of the parameters, as a trace has them."""
        try:
            bound = inspect.signature(self._traced.python_function).bind(*args, **kwargs)
        except (TypeError, ValueError):
            return args, kwargs
        return bound.args, bound.kwargs

    def _tell(self, why: str) -> None:
        log.warn_once(f"hvdrun --auto computes {self.name} on the first rank alone: {why}.")

    def _divide(
        self, alone: Any, given: Any, tensors: list[Any], rows: int, kind: _Kind, whole: Whole
    ) -> tuple[Way | None, Any]:
        """Take a step; return what runs this function divided from now on, and the outputs.

        None if that is not possible.
        """
        graph = alone.graph
        taken = graph.inputs[: len(graph.inputs) - len(alone.captured_inputs)]
        pairs = list(zip(taken, tensors, strict=False))
        if len(taken) != len(tensors) or not all(
            t.shape.is_compatible_with(x.shape) for t, x in pairs
        ):
            self._tell("its arguments are not those of its graph")
            return None, whole()
        is_free = all(t.shape[0] is None for t, x in pairs if _has(x, rows))
        # One process draws anew in each trace.
        key = kind.shapes, id(alone if is_free else kind) if is_free or kind.draws else 0
        nodes = [*itertools.chain(*nodes_of(alone))]
        hidden = check.hidden(nodes)
        if hidden and not is_free:
            self._tell(f"{hidden} in it cannot be computed twice, to compare the results")
            return None, whole()
        if self._has_xla and check.draws(nodes):
            self._tell("XLA draws its random numbers; jit_compile=False lets it be divided")
            return None, whole()
        if key not in self._built:
            self._built[key] = self._build(alone, is_free, given, tensors, rows, kind)
        built = self._built[key]
        if built is None:
            return None, whole()
        run, traced = built
        variables = check.assigned(alone, traced)
        has_room = check.fits(variables)
        if is_free and (hidden or not has_room):
            return run, run(tensors)
        if not has_room:
            self._tell("its variables are too large to compare two steps")
            return None, whole()
        divided = functools.partial(run, tensors)
        why, outputs = check.compared(whole, divided, variables, check.rounding_of(nodes))
        if why:
            self._is_other = True
            self._tell(f"divided, it gives something else: {why}")
        return None if why else run, outputs

    def _build(
        self, alone: Any, is_free: bool, given: Any, tensors: list[Any], rows: int, kind: _Kind
    ) -> tuple[Way, Any] | None:
        """Return what runs it divided, and the trace that is made of; None if there is none."""

        def spec(x: Any) -> Any:
            if not isinstance(x, tf.Tensor):
                return x
            return tf.TensorSpec([None, *x.shape[1:]] if _has(x, rows) else x.shape, x.dtype)

        traced = alone
        if not is_free:
            args, kwargs = tf.nest.map_structure(spec, given)
            python = self._traced.python_function
            again = function(python, autograph=getattr(self._traced, "_autograph", True))
            try:
                again_now = agree.within(is_again, True)
                with self._drawing(kind.draws), another_trace(kind.random), again_now:
                    traced = again.get_concrete_function(*args, **kwargs)
            except Exception as error:  # it may succeed with a fixed number of rows
                self._tell(f"without a fixed number of rows it fails: {_first_line(error)}")
                return None
        try:
            plan, taken = planned(traced, rows, tensors)
            run = _build(plan, traced, taken)
        except (WholeError, UnknownError) as why:
            self._tell(str(why) or "a shape in it is unknown")
            return None
        except messages.LEFT:
            raise
        except Exception as error:  # nothing runs yet, so the function may stay as it is
            self._tell(f"it cannot be divided: {_first_line(error)}")
            return None
        if plan.whole:
            more = f" and {len(plan.whole) - 3} more" if len(plan.whole) > 3 else ""
            log.warn_once(
                f"hvdrun --auto computes on the first rank alone, in {self.name}: "
                f"{', '.join(plan.whole[:3])}{more}. These compare rows, or have no rule; the "
                "rest of it is divided."
            )
        self._kept += [alone, traced]
        return run, traced


def planned(traced: Any, rows: int, tensors: Sequence[Any] = ()) -> tuple[Plan, int]:
    """Return the plan of a traced function, and how many tensors it takes; or raise WholeError.

    Args:
        rows: of a usual batch.
        tensors: such a batch, if the trace does not know all inner shapes.
    """
    graph = traced.graph
    taken = len(graph.inputs) - len(traced.captured_inputs)
    shapes = {i: t.shape for i, t in enumerate(graph.inputs[:taken])}
    for i, x in enumerate(tensors):
        if x.shape.rank:
            shapes[i] = tf.TensorShape([None if _has(x, rows) else x.shape[0], *x.shape[1:]])
    divided = [
        i < taken and bool(shapes[i].rank) and shapes[i][0] is None and t.dtype.name in SENT
        for i, t in enumerate(graph.inputs)
    ]
    if not any(divided):
        raise WholeError("no part of its batch is sent to other ranks")
    return Plan(graph, divided, traced.captured_inputs, rows, shapes), taken


@contextlib.contextmanager
def another_trace(state: Any = None) -> Iterator[None]:
    """Let Python and NumPy draw as before afterwards; in the block, from this state on."""
    now = per_rank.random_state()
    try:
        per_rank.set_random_state(state or now)
        yield
    finally:
        per_rank.set_random_state(now)


def _build(plan: Plan, traced: Any, taken: int) -> Callable[[list[Any]], Any]:
    """Build the first rank's part of a planned function, and that of the others; send that."""
    graph, size, name = traced.graph, rank_info.size(), worker.next_name()
    with tf.Graph().as_default() as theirs:
        rank = tf.cast(raw.hvd_rank_info(what="rank"), tf.int64)
        Side(plan, name, rank, size, None).build()

    def compute(*leaves: Any) -> Any:
        side = Side(plan, name, 0, size, [*leaves, *traced.captured_inputs])
        found = {id(t): x for t, x in zip(graph.outputs, side.build(), strict=True)}
        return tf.nest.map_structure(
            lambda t: found.get(id(t), t), traced.structured_outputs, expand_composites=True
        )

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs[:taken]]
    mine = function(compute, autograph=False).get_concrete_function(*specs)
    both = worker.share(mine, theirs)
    send_kept = keep.kept(plan.kept.values())

    def run(tensors: list[Any]) -> Any:
        send_kept()
        keep.forget(plan.assigned)
        # Of arrays, input_signature may want another dtype.
        return both([tf.cast(x, t.dtype) for x, t in zip(tensors, specs, strict=True)])

    return run


def _tensor(x: Any) -> Any:
    """Return an argument as a trace has it: arrays, and what is like them, are tensors."""
    is_tensor = isinstance(x, (tf.Tensor, tf.Variable, tf.__internal__.CompositeTensor))
    is_array = hasattr(x, "__array__") and not isinstance(x, type)
    return tf.convert_to_tensor(x) if is_array and not is_tensor else x


def _described(x: Any, has_rows: bool) -> Any:
    """Return what a trace depends on."""
    if isinstance(x, tf.Tensor):
        return x.dtype, *x.shape[has_rows:]
    return (type(x), x) if isinstance(x, (int, float, str, bytes, type(None))) else id(x)


def _rows(tensors: list[Any]) -> int:
    """Return the number of rows: the first size that most of the tensors have; 0: not divisible."""
    found = [int(x.shape[0]) for x in tensors if x.shape.rank]
    rows = max(found, key=found.count, default=0)
    return rows if rows >= rank_info.size() else 0  # some ops of TensorFlow abort without any


def _has(x: Any, rows: int) -> bool:
    return isinstance(x, tf.Tensor) and bool(x.shape.rank) and x.shape[0] == rows


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"
