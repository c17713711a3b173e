"""Finds lines that a script lacks, without which each rank would train a separate model.

That is an error, unless ``local_fit`` declares that a rank trains alone; with ``HVD_STRICT=0`` a
warning. Other advice is a warning; with ``HVD_STRICT=1`` an error.
"""

import atexit
import collections
import contextlib
import contextvars
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from hvd_keras.gradients import model_ranks, shards
from hvd_keras.runtime import agree, libraries, log, rank_info, settings
from hvd_keras.runtime.keras import (
    graph,
    is_eager,
    is_recording,
    optimizer_classes,
    outside_graphs,
    values_of,
)
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

#: The model of the ``fit`` that runs, in a tuple; or whether one does.
in_fit: contextvars.ContextVar[Any] = contextvars.ContextVar("a fit is running", default=False)
#: Whether it knows that several ranks train its model, or that one does.
fit_is_known = contextvars.ContextVar("fit knows the ranks", default=True)

# A loop that has made this many steps with different weights will not broadcast them any more.
_STEPS_UNTIL_TOLD = 20

# A script whose first steps are local and that has exchanged nothing until then never will.
_SECONDS_UNTIL_TOLD = 60

# More than averages of losses and metrics are.
_FEW_BYTES = 128


@contextlib.contextmanager
def local_fit() -> Iterator[None]:
    """Context manager: this rank trains alone, on purpose, in this thread.

    Outside of it, hvd_keras raises an error (with ``HVD_STRICT=0`` it warns) if a job of several
    ranks applies gradients that were not exchanged, trains with different weights, or trains on
    the same rows. In it, ``fit`` and callbacks of hvd_keras wait for no other rank, but for a model
    with a distributed optimizer.

    Example:
        with hvd.local_fit():
            baseline.fit(x, y)
    """
    several = rank_info.is_initialized() and rank_info.size() > 1
    with agree.within(model_ranks.alone, several):
        yield


def apply(method: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Replace ``Optimizer.apply``. By default, it updates what the optimizer was built for.

    It refuses gradients that were not exchanged, and what would clip by norms unknown here.
    """
    if not hasattr(optimizer, "_hvd_reducer"):
        grads, variables = list(grads), trainable_variables
        if variables is None:
            variables = getattr(optimizer, "_trainable_variables", ())
        check_update(optimizer, grads, list(variables))
    return method(optimizer, grads, trainable_variables)


def apply_pairs(method: Any, optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Optimizer.apply_gradients`` of tf_keras, in the same way."""
    pairs = list(grads_and_vars)
    if not hasattr(optimizer, "_hvd_reducer"):
        check_update(optimizer, [grad for grad, _ in pairs], [variable for _, variable in pairs])
    return method(optimizer, pairs, *args, **kwargs)


def check_update(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Raise a RuntimeError if an optimizer, not distributed, applies gradients of this rank alone.

    In a graph, when that is traced.
    """
    global _has_updated
    _has_updated = True
    several = rank_info.is_initialized() and rank_info.size() > 1
    shards.check_clipping(optimizer, variables, model_ranks.local_variables if several else ())
    if (
        model_ranks.alone.get()
        or hasattr(optimizer, "_hvd_alone")
        or agree.is_building.get()
        or not several
        or _in_update.get() is not None
    ):
        return
    pairs = list(zip(gradients, variables, strict=False))
    if any(v in of for v in variables for of in (_of_tapes, _in_functions, _by_themselves)):
        pairs = [pair for pair in pairs if _is_alone(*pair)]
        _of_tapes.discard(*variables)  # which the next step must exchange again
        forget_tapes(variables)
        if not pairs:
            return
    if _averages_itself(optimizer, pairs):
        return
    name, can_wrap = type(optimizer).__name__, isinstance(optimizer, optimizer_classes)
    text = (
        f"optimizer {name} applies gradients of this rank alone, so each of the "
        f"{rank_info.size()} ranks trains a different model. "
        + (f"Use hvd.DistributedOptimizer({name}(...)), or average" if can_wrap else "Average")
        + " the gradients with hvd.allreduce (of a tape: hvd.DistributedGradientTape). If a rank "
        "trains alone on purpose, write: with hvd.local_fit(): ..."
    )
    if not first_steps_are_local or in_fit.get() or not variables:
        # A graph may apply what the script has reduced outside of it; that cannot be seen.
        is_here = any(_noted(v) is graph() for v in variables)
        parts = in_fit.get() or is_eager() or is_here
        if not parts:  # in a graph, so of TensorFlow
            from hvd_keras import ops

            parts = not ops.has_reduced()
        tell(text, global_process_set, RuntimeError, parts=parts)
        told_alone.add(*variables)
        return
    if is_error(parts=False):
        raise RuntimeError(f"hvd_keras: {text}")

    def is_reduced() -> bool:
        return any(variable in reduced for variable in variables)

    last = time.monotonic() + _SECONDS_UNTIL_TOLD
    _tell_later(
        text, global_process_set, is_reduced, lambda: is_reduced() or time.monotonic() >= last
    )


# Optimizers that have applied what the script has reduced; and how many bytes this process had
# exchanged when others last applied gradients in eager code.
_by_hand: weakref.WeakSet[Any] = weakref.WeakSet()
_exchanged_before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
#: What tapes have returned in graphs: the names of tensors.
of_tapes: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def note_tape(sources: Sequence[Any], gradients: Iterable[Any]) -> None:
    """Note what a tape returns, and in which graph; in eager code, what was exchanged by then."""
    global _of_arrays
    for one in gradients:
        for part in (one, getattr(one, "values", None)):
            if part is not None and hasattr(part, "graph"):
                of_tapes.setdefault(part.graph, set()).add(part.name)
    variables = [one for one in sources if hasattr(one, "assign")]
    if variables and rank_info.is_initialized() and rank_info.size() > 1:
        _of_arrays |= any(getattr(v.shape, "rank", v.shape) not in (0, ()) for v in variables)
        if not (_updates_are_checked or model_ranks.alone.get()):
            _check_at_exit()
        where = _by_script() - _bytes["tape"] if is_eager() else weakref.ref(graph())
        for variable in variables:
            shards.inner_variable(variable)._hvd_tape = where


_of_arrays = False  # tapes have returned gradients of more than numbers
_updates_are_checked = False  # or are going to be, at the end of the script


def _check_at_exit() -> None:
    """Tell at the end if no tensor was exchanged, nor has an optimizer applied gradients."""
    global _updates_are_checked
    _updates_are_checked = True
    size, is_first, process = rank_info.size(), rank_info.rank() == 0, os.getpid()
    before = count("requests", others := ("allgather", "reducescatter", "alltoall"))

    @atexit.register
    def check() -> None:
        from hvd_keras import ops

        if os.getpid() != process or _has_updated:  # or a fork of the script's ends
            return
        if ops.has_reduced(arrays=_of_arrays) or count("requests", others) != before:
            return
        text = (
            f"each of the {size} ranks has taken gradients by a tf.GradientTape, but they have "
            "exchanged none, and no optimizer of Keras has applied any. If the script assigns what "
            "it makes of them, each rank has trained a different model: use "
            "hvd.DistributedGradientTape."
        )
        if is_error(parts=False):
            log.fail_at_exit(text)
        elif is_first:
            log.warn_once(text)


def _noted(variable: Any) -> Any:
    where = getattr(shards.inner_variable(variable), "_hvd_tape", None)
    return where() if callable(where) else where


def _is_alone(gradient: Any, variable: Any) -> bool:
    """Whether a plain tape alone has returned a gradient, of a variable that all ranks train."""
    is_own = variable in model_ranks.local_variables or shards.of(variable) is not None
    if gradient is None or variable in _of_tapes or is_own or hasattr(gradient, "_hvd_reduced"):
        return False
    noted = _noted(variable)
    if not is_eager():
        return noted is graph()
    is_unknown = variable in _in_functions and variable not in _by_themselves
    return isinstance(noted, int) or is_unknown


def _averages_itself(optimizer: Any, pairs: list[tuple[Any, Any]]) -> bool:
    """Whether the script averages gradients with ``hvd.allreduce`` before it applies them."""
    if is_eager():
        # What this process had exchanged when a tape returned the gradients; or, of those from
        # elsewhere, at the optimizer's last step.
        before, now = _exchanged_before.get(optimizer), _by_script()
        without_tapes = now - _bytes["tape"]
        _exchanged_before[optimizer] = now
        # A function may have returned them, which was traced before.
        notes = [None if v in _in_functions else _noted(v) for _, v in pairs]
        done = [without_tapes - n if isinstance(n, int) else before and now - before for n in notes]
        # After another hvd.init() the counters begin anew.
        done = [None if number is not None and number < 0 else number for number in done]
        # An average of the loss is fewer bytes than gradients are, even if these are compressed.
        given = [one for one, _ in pairs if one is not None]
        present = [one.values if hasattr(one, "dense_shape") else one for one in given]
        least = max(1, min(_FEW_BYTES, sum(math.prod(one.shape) for one in present)))
        return any(number is None or number >= least for number in done or [before])
    from hvd_keras import ops

    whole = [one for one, v in pairs if one is not None and shards.of(v) is None]
    if whole and all(ops.is_reduced(one, of_tapes) for one in whole):
        _by_hand.add(optimizer)
        return True
    return optimizer in _by_hand and not any(_noted(v) is graph() for _, v in pairs)


#: Whether scripts step on each rank before the first exchange, to create variables.
first_steps_are_local = False

#: Whether the tape that computes gradients does so for variables, and not an adversarial example.
of_variables = contextvars.ContextVar("gradients of variables", default=True)

_has_updated = False  # an optimizer or a reducer has had gradients
synchronized = shards.VariableSet()  # broadcast, or found equal
reduced = shards.VariableSet()  # a reducer has had their gradients
_of_tapes = shards.VariableSet()  # a distributed tape has, since an optimizer has applied them
_in_functions = shards.VariableSet()  # it was traced, and may run again without Python
_by_themselves = shards.VariableSet()  # with a set of this rank alone
#: The same of eager code, by the tape's process set.
of_distributed: dict[int, shards.VariableSet] = collections.defaultdict(shards.VariableSet)
begun_apart = shards.VariableSet()  # found different; what to do is told later
told_alone = shards.VariableSet()  # a warning was about them; later differences are no news


def mark_alone(optimizer: Any) -> None:
    """Record that a script leaves this rank out of what others train together."""
    optimizer._hvd_alone = True
    if hasattr(optimizer, "inner_optimizer"):
        optimizer.inner_optimizer._hvd_alone = True


def mark_reduced(sources: Iterable[Any], by_tape: bool = False, size: int = 1) -> None:
    """Record that a reducer of so many ranks has the gradients of variables, perhaps tensors."""
    global _has_updated
    _has_updated = True
    variables = [source for source in sources if hasattr(source, "assign")]
    reduced.add(*variables)
    if by_tape:
        for of in (_of_tapes, *([] if is_eager() else [_in_functions])):
            of.add(*variables)
        if size == 1:
            _by_themselves.add(*variables)
        for variable in variables:
            shards.inner_variable(variable)._hvd_tape = None


def forget_tapes(variables: Sequence[Any]) -> None:
    """Forget which gradients distributed tapes have returned in eager code: they are applied."""
    for noted in of_distributed.values():
        noted.discard(*variables)


def fit_has(variables: Sequence[Any]) -> bool:
    """Whether ``fit`` runs, of a model that has these variables, by the first."""
    fit = in_fit.get()
    if not isinstance(fit, tuple) or not variables:
        return bool(fit)
    number = shards.variable_id(variables[0])
    return any(shards.variable_id(v) == number for v in fit[0].variables)


#: A warning about the last loss whose gradients must not be averaged; the graph that it is in, and,
#: if a tape has recorded it, those that call that.
unaveraged: list[tuple[str, list[Any]]] = []


def warn_if_averaged(text: str, of_gradient: bool = False) -> None:
    """Warn about a loss, if a reducer averages its gradients: in this graph, or in eager code.

    ``of_gradient``: a tape computes them now, and so records no more.
    """
    if of_variables.get() if of_gradient else not is_eager() or is_recording():
        graphs = [graph()]
        while (of_gradient or is_recording()) and getattr(graphs[-1], "outer_graph", None):
            graphs.append(graphs[-1].outer_graph)
        unaveraged[:] = [(text, graphs)]


def check_average() -> None:
    """Tell what ``warn_if_averaged`` was given; a reducer averages gradients now."""
    for text, graphs in unaveraged[:]:
        if any(one is graph() for one in graphs) and model_ranks.averages_rows:
            unaveraged.clear()
            tell(text)


def warn_of_empty_broadcast(process_set: ProcessSet) -> None:
    """Tell that ``broadcast_variables`` got nothing, most often of a model that is not built."""
    tell(
        "hvd.broadcast_variables got no variables, so the ranks keep different values. If the "
        "model is not built yet, call it once on a batch of data first, or use "
        "hvd.callbacks.BroadcastGlobalVariablesCallback in fit().",
        process_set,
    )


def check_weights(
    name: str,
    what: str,
    variables: Sequence[Any],
    requests: int,
    process_set: ProcessSet,
    trained: Iterable[Any] = (),
) -> bool:
    """Compare the ranks' initial weights, or other values.

    In ``fit`` a difference is a ValueError on all ranks (with ``HVD_STRICT=0`` a warning). A custom
    loop may broadcast after its first step, as Horovod's documentation advises, so there the error
    comes some steps later.

    Args:
        name: the name of the optimizer or tape.
        what: the variables are, in words.
        variables: those that all ranks have and that were not compared before.
        requests: the number of requests per step for them.
        trained: variables that will differ, too, which is then no news.

    Returns:
        False if the variables have no values yet: a ``tf.function`` initializes the variables that
        it creates after its first trace, and then traces again. True otherwise.
    """
    gathered = agree.gather_json(f"{name}.{what}", _digest(variables), process_set)
    if _NO_VALUES in gathered:
        return False
    if None in gathered or len(set(gathered)) == 1 or model_ranks.alone.get():
        return True
    text = (
        f"the {process_set.size()} ranks began to train with different {what}, so each of them "
        "trains a different model. "
    )
    text += (
        ADD_THE_CALLBACK
        if in_fit.get()
        else "Add hvd.broadcast_variables(model.variables, root_rank=0), and the same for "
        "optimizer.variables, before the first step or right after it."
    )
    if is_error(parts=False) or (in_fit.get() and not first_steps_are_local):
        told_alone.add(*trained)
        tell(text, process_set, parts=True)
    else:
        synchronized.discard(*variables, *trained)  # what was broadcast has changed since
        begun_apart.add(*variables, *trained)
        # In a graph, the requests of later steps can be counted, not the steps.
        last = count("requests") + requests * _STEPS_UNTIL_TOLD
        _tell_later(
            text,
            process_set,
            lambda: all(variable in synchronized for variable in variables),
            lambda: count("requests") >= last,
        )
    return True


def is_error(parts: bool) -> bool:
    """Whether advice is an error, by ``HVD_STRICT`` and whether it is about models that part."""
    strict = settings.read().strict
    return parts if strict is None else strict


def tell(
    text: str,
    process_set: ProcessSet | None = None,
    kind: type[Exception] = ValueError,
    parts: bool = False,
) -> None:
    """Raise an error of this kind, or warn once, on the first rank of the set or each without one.

    Args:
        text: what is wrong, and what to do.
        process_set: the ranks that all call this.
        kind: of the error.
        parts: whether the ranks train separate models.
    """
    if is_error(parts):
        raise kind(f"hvd_keras: {text}{_ALLOWED if parts else ''}")
    if process_set is None or process_set.rank() == 0:
        log.warn_once(text)


ADD_THE_CALLBACK = "Add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of fit."
_ALLOWED = " (HVD_STRICT=0 makes this error a warning.)"
_NO_VALUES = "no values"


def _digest(variables: Sequence[Any]) -> int | str | None:
    """Hash the values; None if they are unknown, or ``fit`` has compared them as it began."""
    digest = 0
    with outside_graphs():
        is_known = in_fit.get() and all(v in synchronized for v in variables)
        if is_known or not is_eager():  # in graphs of TensorFlow 1, nothing has a value
            return None
        inner = map(shards.inner_variable, variables)
        if not all(v.is_initialized() for v in inner if hasattr(v, "is_initialized")):
            return _NO_VALUES
        for variable in variables:
            digest = agree.digest(values_of(variable), digest)
    return digest


_OF_GRADIENTS = ("allreduce", "allgather")


def count(what: Literal["requests", "bytes"], kinds: Iterable[str] = _OF_GRADIENTS) -> int:
    """How many requests of some kinds this process has served, or their bytes."""
    counters = json.loads(libraries.core().hvd_stats())["collectives"]
    return sum(int(counters[kind][what]) for kind in kinds if kind in counters)


# How many bytes distributed optimizers and tapes have exchanged in eager code.
_bytes = collections.Counter[str]()
#: The variables that a distributed optimizer updates; None outside of an update.
_in_update: contextvars.ContextVar[Sequence[Any] | None] = contextvars.ContextVar(
    "a distributed optimizer updates", default=None
)


@contextlib.contextmanager
def exchange_by(who: Literal["optimizer", "tape"], variables: Sequence[Any] = ()) -> Iterator[None]:
    """An optimizer exchanges and applies gradients, as others in it may; or a tape exchanges.

    Raises ValueError if an optimizer does so for variables of one within which it is called.
    """
    outer = _in_update.get() or ()
    if outer and set(map(shards.variable_id, outer)) & set(map(shards.variable_id, variables)):
        raise ValueError(
            "hvd.DistributedOptimizer: this optimizer is called within another distributed one, so "
            "gradients would be reduced twice. Wrap the optimizer of compile, or its parts, not "
            "both."
        )
    before = count("bytes") if is_eager() else 0
    try:
        with agree.within(_in_update, (variables or outer) if who == "optimizer" else None):
            yield
    finally:
        _bytes[who] += count("bytes") - before if is_eager() else 0


def _by_script() -> int:
    """How many bytes were exchanged otherwise than by optimizers, those of tapes included."""
    return count("bytes") - _bytes["optimizer"]


def _tell_later(
    text: str, process_set: ProcessSet, is_needless: Callable[[], bool], is_due: Callable[[], bool]
) -> None:
    """Tell when it is due, at the latest at the end, unless the script made it needless by then."""
    is_error_now = is_error(parts=True)
    if is_error_now or process_set.rank() == 0:
        text += _ALLOWED * is_error_now
        log.tell_later(text, is_error_now, is_needless, is_due, rank_info.is_initialized)
