"""Which ranks train a model together, and which variables belong to one rank alone.

Callbacks and patches of Keras ask here. The answers come from the reducer in the
attribute ``_hvd_reducer`` of the model's optimizers.
"""

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from hvd_keras.gradients import shards
from hvd_keras.runtime.keras import innermost, is_legacy, keras, optimizer_classes, overrides
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.runtime.reductions import ReduceOp


class Reducer(Protocol):
    """What reduces the gradients of a distributed optimizer, as ``reducer.GradientReducer``."""

    name: str
    process_set: ProcessSet
    op: ReduceOp
    is_sharded: bool
    averages_rows: bool
    options: Any  # agreement.ExchangeOptions
    rounds: Any  # training.rounds.Rounds, if the ranks average weights; else None


def reducer_of(optimizer: Any) -> Reducer | None:
    """The reducer of a distributed optimizer, also inside a LossScaleOptimizer; else None."""
    return getattr(innermost(optimizer), "_hvd_reducer", None)


def reducer_within(optimizer: Any) -> Reducer | None:
    """That of an optimizer, or else of one of its parts."""
    return next(iter(_reducers([optimizer, *_parts_of(optimizer)])), None)


def is_sharded(optimizer: Any) -> bool:
    """Whether each rank has a share of an optimizer's state (``shard_state=True``)."""
    reducer = reducer_of(optimizer)
    return reducer is not None and reducer.is_sharded


def optimizers_of(model: Any, within: bool = False) -> list[Any]:
    """The optimizers of a model: that of ``compile``, and those in attributes, such as a GAN's.

    After a ``MultiOptimizer`` its parts follow; those that a function chooses, once it is built.

    Args:
        within: whether those of its layers follow, if it has a step of its own, which may use them;
            those that compile has given models within it, if they are distributed.
    """
    optimizers = [*_optimizers_in(getattr(model, "optimizer", None)), *_optimizers_in(vars(model))]
    if within and overrides(model, "train_step"):
        for layer in model._flatten_layers(include_self=False):
            own = getattr(layer, "optimizer", None) if isinstance(layer, keras.Model) else None
            # What compile has given a model within may be unused, and built on some ranks alone.
            found = _optimizers_in(vars(layer))
            optimizers += [one for one in found if one is not own or reducer_of(one)]
    main = innermost(getattr(model, "optimizer", None))  # another one may have some variables
    if isinstance(main, _several) and not main.built and model.built:
        main.build(model.trainable_variables)
    every = [one for value in optimizers for one in (value, *_parts_of(value))]
    return list({id(one): one for one in every}.values())


_several: Any = getattr(keras.optimizers, "MultiOptimizer", ())  # Keras has it from 3.15 on


def refuse_distributed(optimizer: Any) -> None:
    """Raise ValueError if an optimizer is distributed, or one of its parts."""
    if any(hasattr(one, "_hvd_reducer") for one in (optimizer, *_parts_of(optimizer))):
        raise ValueError(
            f"hvd.DistributedOptimizer: this {type(optimizer).__name__} is distributed already. "
            "Wrap an optimizer once."
        )


def accumulate(optimizer: Any, passes: int) -> None:
    """Let an optimizer update once for so many steps. Raises ValueError if it cannot."""
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes!r}, expected a positive integer.")
    if passes == 1 or is_legacy:
        return
    kind = type(optimizer).__name__
    if isinstance(optimizer, _several):
        why = f"a {kind} cannot add up gradients"
    elif own := optimizer.gradient_accumulation_steps:
        if own == passes:  # as a loaded one
            return
        why = f"this {kind} has gradient_accumulation_steps={own} already"
    elif optimizer.built:
        why = f"this {kind} is built already"
    else:
        optimizer.gradient_accumulation_steps = passes
        optimizer._hvd_accumulates = True  # its configuration had none
        return
    raise ValueError(
        f"backward_passes_per_step is {passes}, but {why}. Set gradient_accumulation_steps when "
        "you make the optimizer or its parts, and leave backward_passes_per_step out: then Keras "
        "applies the mean of the local steps, not their sum."
    )


def _parts_of(optimizer: Any) -> list[Any]:
    """The parts of a ``MultiOptimizer``, also inside a LossScaleOptimizer."""
    inner = innermost(optimizer)
    return list(inner.optimizers) if isinstance(inner, _several) else []


def _optimizers_in(value: Any, depth: int = 3) -> list[Any]:
    """The optimizers in nested containers."""
    if isinstance(value, optimizer_classes):
        return [value]
    if not depth or not isinstance(value, (dict, list, tuple)):
        return []
    parts = list(value.values() if isinstance(value, dict) else value)
    return [one for part in parts for one in _optimizers_in(part, depth - 1)]


def reducers_of(model: Any) -> list[Reducer]:
    """Return the reducers of a model's distributed optimizers."""
    return _reducers(optimizers_of(model))


def _reducers(optimizers: Iterable[Any]) -> list[Reducer]:
    return list({id(r): r for r in map(reducer_of, optimizers) if r is not None}.values())


#: Whether a mean counts all rows alike, as one process does; otherwise all ranks, whatever their
#: losses are divided by. For models whose optimizers do not say.
averages_rows = True


def averages_rows_of(model: Any) -> bool:
    """Whether the mean of a model's gradients over the ranks counts all rows alike."""
    reducers = reducers_of(model)
    return all(reducer.averages_rows for reducer in reducers) if reducers else averages_rows


#: This rank, of several, trains models without a distributed optimizer alone.
alone = contextvars.ContextVar("inside hvd.local_fit", default=False)

#: A ``fit`` runs whose model no other rank trains.
fits_alone = contextvars.ContextVar("a fit of one rank is running", default=False)

#: The ranks on which a callback of hvd_keras takes part in a model's training.
together: weakref.WeakKeyDictionary[Any, ProcessSet] = weakref.WeakKeyDictionary()


def process_set_of(model: Any) -> ProcessSet | None:
    """Return the ranks that train a model together; None if this rank trains it alone.

    They are the ranks of its distributed optimizers. A model without one, whose ``train_step`` uses
    a ``hvd.DistributedGradientTape``, is recognised by a callback of hvd_keras in ``fit``, but not
    in ``hvd.local_fit``.

    Raises:
        ValueError: its optimizers have different process sets.
    """
    reducers = reducers_of(model)
    if not reducers and not alone.get():  # its own step may use those of models within it
        reducers = _reducers(optimizers_of(model, within=True))
    whole = [(reducer.rounds or reducer).process_set for reducer in reducers]
    sets = {process_set.id(): process_set for process_set in whole}
    if len(sets) > 1:
        raise ValueError(
            f"the optimizers of model {model.name!r} have different process sets: "
            f"{', '.join(map(str, sets.values()))}. Give them the same process set."
        )
    return next(iter(sets.values()), None) or (None if alone.get() else together.get(model))


def is_outside(model: Any) -> bool:
    """Whether a script of Horovod leaves this rank out of those that train the model together."""
    return hasattr(innermost(getattr(model, "optimizer", None)), "_hvd_alone")


def note_callbacks(model: Any, callbacks: Iterable[Any]) -> ProcessSet | None:
    """Return the ranks that train a model together, as ``process_set_of``, by callbacks, too.

    Raises ValueError if these have different process sets.
    """
    if not (alone.get() or is_outside(model) or reducers_of(model)):
        # A train_step with hvd.DistributedGradientTape is recognised by callbacks of hvd_keras.
        given = [getattr(callback, "_hvd_process_set", None) for callback in callbacks]
        sets: dict[Any, ProcessSet] = {one.process_set_id: one for one in given if one is not None}
        everyone = sets.pop(0, None)  # by default
        if len(sets) > 1:
            raise ValueError(
                f"the callbacks of model {model.name!r} have different process sets: "
                f"{', '.join(map(str, sets.values()))}. Give them that of "
                "hvd.DistributedGradientTape."
            )
        if found := next(iter(sets.values()), everyone):
            together[model] = found
    return process_set_of(model)


def rounds_of(model: Any) -> list[Any]:
    """Return the rounds of a model's optimizers; none if the ranks average gradients alone."""
    return [reducer.rounds for reducer in reducers_of(model) if reducer.rounds is not None]


def step_set_of(model: Any) -> ProcessSet | None:
    """Return the ranks that average their gradients in each step, as ``process_set_of``."""
    sets = [reducer.process_set for reducer in reducers_of(model) if reducer.rounds is not None]
    return sets[0] if sets else process_set_of(model)


#: Variables that belong to this rank alone, of all models.
local_variables = shards.VariableSet()


#: Distributed optimizers of Keras 3.
distributed: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_local(model: Any) -> None:
    """Let those variables of a model be local that its distributed optimizers keep so."""
    mine: list[Any] = _reducers(optimizers_of(model, within=True))
    if mine:  # and not a tape in its step
        with contextlib.suppress(ValueError):  # a model of tf_keras that has none yet
            local_variables.discard(*model.variables)
    for reducer in mine:
        if (reducer.rounds or reducer).process_set.size() > 1:
            local_variables.add(*getattr(reducer, "local", {}).values())


def without_local(variables: Iterable[Any]) -> list[Any]:
    """Return those of a model's and its optimizers' variables that all ranks have in common."""
    found = shards.without(variables)
    local = [variable for variable in found if variable in local_variables]
    owners = {number: of for optimizer in distributed for number, of in _slots(optimizer)}

    def is_local(variable: Any) -> bool:
        if variable in local_variables:
            return True
        number = shards.variable_id(variable)
        return owners[number] in local_variables if number in owners else _is_of(variable, local)

    return [variable for variable in found if not is_local(variable)]


def _slots(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yield an optimizer's variables, by ``variable_id``, with the weights that they belong to."""
    weights = getattr(optimizer, "_trainable_variables", ())
    for name, slots in vars(optimizer).items():
        # In the order of the weights; a slot may have another shape than its weight.
        if isinstance(slots, list) and len(slots) == len(weights) and name != "_variables":
            pairs = zip(slots, weights, strict=True)
            yield from ((shards.variable_id(s), w) for s, w in pairs if hasattr(s, "assign"))


def _is_of(variable: Any, local_ones: Iterable[Any]) -> bool:
    """Whether an optimizer that is not known has a variable for one of those, by its name."""
    name = getattr(variable, "name", "")
    for local in local_ones:
        path = getattr(local, "path", None)
        if path is None:  # tf_keras
            is_its = f"/{local.name.partition(':')[0]}" in name
        else:
            is_its = name.startswith(path.replace("/", "_") + "_")
        if is_its and tuple(local.shape) == tuple(variable.shape):
            return True
    return False
