"""Lists, averages and scales the variables of a training, on every backend of Keras."""

import collections
import contextlib
import dis
import importlib
import random
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hvd_keras.gradients import model_ranks, shards, specs
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import (
    Variable,
    flatten,
    innermost,
    innermost_of,
    is_legacy,
    keras,
    optimizer_classes,
    require,
)
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.runtime.reductions import Adasum, Average, Max, Min


def training_variables(model: Any, builds: bool = True) -> list[Any]:
    """Return the variables of a model and its optimizers, in the same order on all ranks.

    ``builds``: the optimizer of ``compile`` is to update all weights of the model.
    """
    # Builds the optimizer of compile if necessary. It cannot build others, such as a GAN's, because
    # it does not know which variables they update.
    found = [*model.variables, *recurrent_states(model._flatten_layers())]
    reducers = model_ranks.reducers_of(model)
    for optimizer in model_ranks.optimizers_of(model, within=True):
        # Not the default of compile, which updates nothing in a model with distributed optimizers.
        of_it = model_ranks.reducer_of(optimizer)
        if (builds and optimizer is model.optimizer) and (
            is_legacy or (not optimizer.built and (of_it is not None or not reducers))
        ):
            optimizer.build(model.trainable_variables)  # tf_keras skips this if it is built
        found += variables_of(optimizer)
        # Keras leaves out what an optimizer within a LossScaleOptimizer makes itself, such as a
        # variable of Nadam.
        found += [v for v in vars(innermost(optimizer)).values() if isinstance(v, Variable)]
    for rounds in model_ranks.rounds_of(model):
        found += [*rounds.variables(), *rounds.sent]
    return list({shards.variable_id(v): v for v in found}.values())


def unlisted(layers: Iterable[Any], generators: bool = False) -> dict[str, Any]:
    """Return the variables that are attributes in a model and that Keras 3 does not list.

    By names that are the same on all ranks. They may be in containers, in objects, and in what a
    function takes from outside, such as a loss.

    Args:
        layers: of the model, which is the first.
        generators: whether the states of Keras's random generators count.
    """
    if is_legacy:
        return {}
    layers = list(layers)
    own = training_variables(layers[0], builds=False)
    own += [v for metric in getattr(layers[0], "metrics", ()) for v in metric.variables]
    seen = {*map(id, layers), *map(shards.variable_id, own)}
    found: dict[str, Any] = {}
    counted: collections.Counter[str] = collections.Counter()
    # The shortest name comes first: others may not exist yet after a restart.
    left = collections.deque(
        (specs.common_path(layer.path or layer.name) + name, value)
        for layer in layers
        for name, value in _named(vars(layer))
    )
    while left:
        name, value = left.popleft()
        is_variable = _is_variable(value)
        number = shards.variable_id(value) if is_variable else id(value)
        if number in seen:
            continue
        seen.add(number)
        if not is_variable:
            left += [(name + part, one) for part, one in _within(value, generators)]
        elif shards.of(value) is None:
            counted[name] += 1
            found[f"{name}, {counted[name]}" if counted[name] > 1 else name] = value
    return found


# Whose objects have no variables that Keras does not list, but for the classes that follow.
_FRAMEWORKS = {"hvd_keras", "keras", "numpy", "tensorflow", "torch"}
_HOLDERS = {"ExponentialMovingAverage", "Module"}


def _is_variable(value: Any) -> bool:
    # By the class: objects may answer to any name, or import something.
    kind = type(value)
    is_of_tensorflow = hasattr(kind, "handle") and hasattr(kind, "assign")
    return issubclass(kind, Variable or ()) or is_of_tensorflow


def _within(value: Any, generators: bool) -> Iterable[tuple[str, Any]]:
    """Return what may be or have a variable in an object, with the rest of its name."""
    kind = type(value)
    if issubclass(kind, (type, types.ModuleType)):
        return []
    if isinstance(value, (list, tuple, dict)):
        parts = list(value.values() if isinstance(value, dict) else value)
        if len(parts) > 99:  # rows, or words
            parts = list(filter(_is_variable, parts))
        return [(f"[{number}]", one) for number, one in enumerate(parts)]
    if kind is types.FunctionType:
        # Of a weighed step, what it calls: the rest is hvd_keras's.
        return [("", value._hvd_alone)] if hasattr(value, "_hvd_alone") else _outside(value)
    home = kind.__module__.partition(".")[0]
    is_holder = isinstance(value, optimizer_classes) or kind.__name__ in _HOLDERS
    is_holder |= generators and isinstance(value, keras.random.SeedGenerator)
    is_listed = isinstance(value, (keras.layers.Layer, keras.metrics.Metric))
    if is_listed or (home in _FRAMEWORKS and not is_holder):
        return []
    with contextlib.suppress(AttributeError):
        return _named(object.__getattribute__(value, "__dict__"))
    return []


def _outside(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """Return what a function takes from those around it, and which global variables it reads."""
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in names:
        with contextlib.suppress(ValueError):  # it has no value yet
            yield f".{name}", cell.cell_contents
    for instruction in dis.get_instructions(function):
        value = function.__globals__.get(str(instruction.argval))
        if instruction.opname == "LOAD_GLOBAL" and _is_variable(value):
            yield f".{instruction.argval}", value


def _named(attributes: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    # TensorFlow has lists of its own.
    return [(f".{n}", value) for n, value in attributes.items() if not n.startswith("_self_")]


def tell_unsaved(model: Any, saved: list[Any], process_set: ProcessSet) -> None:
    """Warn, on the first rank, of variables that the traced step uses and a checkpoint lacks."""
    # Keras's function of an iterator calls traced ones.
    function: Any = getattr(model, "train_function", None)
    used: list[Any] = []
    around = [one for _, one in _outside(function)] if hasattr(function, "__closure__") else []
    for one in (function, *around):
        for trace in getattr(one, "_list_all_concrete_functions", list)():
            with contextlib.suppress(AssertionError):  # one that it has used is gone
                used += trace.graph.variables
    own = [*saved, *(v for metric in model.metrics for v in metric.variables)]
    known = {shards.variable_id(v) for v in own + global_seed_states()}
    names = sorted({v.name for v in used if shards.variable_id(v) not in known})
    if names and process_set.rank() == 0:
        log.warn_once(
            f"Checkpoint does not save {', '.join(names[:5])}{' …' * (len(names) > 5)}, which the "
            "training step uses. If training changes it, keep it, or the layer that it is of, in "
            "an attribute of the model or of a layer."
        )


def updated_by(model: Any) -> list[list[int] | None]:
    """Return the places, among a model's variables, of those that each optimizer in it updates.

    None stands for an optimizer that has no variables yet, -1 for a variable of another model.
    """
    places = {id(variable): i for i, variable in enumerate(model.variables)}
    every = model_ranks.optimizers_of(model, within=True)
    found = [getattr(one, "_trainable_variables", None) or () for one in every]
    return [[places.get(id(v), -1) for v in of_one] or None for of_one in found]


def build_optimizers(model: Any, updated: list[list[int] | None]) -> None:
    """Let optimizers update what ``updated_by`` has returned for this model, if they are not built.

    Only a step knows what those of a GAN update, for example.
    """
    every = model_ranks.optimizers_of(model, within=True)
    for optimizer, places in zip(every, updated, strict=False):
        is_known = places and -1 not in places and max(places) < len(model.variables)
        if places and is_known and not optimizer.built:
            optimizer.build([model.variables[i] for i in places])


def variables_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables, and its learning rate, which those of tf_keras leave out."""
    own = optimizer.variables  # a method in tf_keras's legacy family
    rate = getattr(optimizer, "learning_rate", None) if is_legacy else None
    return [*(own() if callable(own) else own), *([rate] if hasattr(rate, "assign") else [])]


#: Layers that had no variables after a step of their model was traced: the model does not use them.
unused: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def is_built(model: Any) -> bool:
    """Whether all layers that the model uses have their variables."""
    return unbuilt(model) <= unused.get(model, set())


def unbuilt(model: Any) -> set[int]:
    """Return the ids of the layers that are not built."""
    return {id(layer) for layer in model._flatten_layers() if not layer.built}


def average_variables(variables: list[Any], process_set: ProcessSet) -> None:
    """Assign to floating-point variables their mean over the ranks; equal ones keep every bit."""
    if process_set.size() == 1 or not variables:
        return
    mine = [np.asarray(variable) for variable in variables]
    call: dict[str, Any] = {"process_set": process_set.id()}
    # A mean of equal values may be rounded to another one; clipped to them it is not.
    smallest, means, largest = (
        agree.run("allreduce", mine, reduction=op.value, name=f"variables' {op.value}s", **call)
        for op in (Min, Average, Max)
    )
    for variable, low, mean, high in zip(variables, smallest, means, largest, strict=True):
        variable.assign(np.clip(mean, low, high))


def accumulators(model: Any) -> list[Any]:
    """Return the variables in which a model's optimizers add up gradients for a later update."""
    optimizers = map(innermost, model_ranks.optimizers_of(model, within=True))
    return [v for one in optimizers for v in getattr(one, "_accumulated_gradients", ())]


def _accumulating(optimizers: Iterable[Any]) -> dict[Any, list[Any]]:
    """Return the sums of this rank's own gradients since the last update, by reducer."""
    found: dict[Any, list[Any]] = {}
    for optimizer in optimizers:
        reducer = model_ranks.reducer_of(optimizer)
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if reducer and steps and optimizer.built and int(optimizer._iterations) % steps:
            found[reducer] = model_ranks.without_local(optimizer._accumulated_gradients)
    return found


def average_accumulated(model: Any, process_set: ProcessSet, other: Any = None) -> list[Any]:
    """Average the ranks' sums of gradients, as one process has them; return them.

    The update averages or adds them up over the ranks, so it is the same as before. Sums of another
    number of steps than those of other ranks, as of a loaded file, are left out. ``other``: an
    optimizer that is in no attribute of the model.
    """
    every = [*model_ranks.optimizers_of(model, within=True), *([] if other is None else [other])]
    optimizers = innermost_of(every)
    accumulates = any(getattr(o, "gradient_accumulation_steps", None) for o in optimizers)
    if is_legacy or not accumulates:  # optimizers of packages do it in their own way there
        return []
    sums = _accumulating(optimizers)
    steps = [
        int(optimizer._iterations) for optimizer in optimizers if getattr(optimizer, "built", False)
    ]
    gathered = agree.gather_json("accumulated gradients", [bool(sums), steps], process_set)
    if any(theirs != gathered[0] for theirs in gathered):
        return []
    for reducer, mine in sums.items():
        if reducer.op is not Adasum:
            average_variables(mine, process_set)
    return [variable for mine in sums.values() for variable in mine]


def moving_statistics(layers: Iterable[keras.layers.Layer]) -> list[Any]:
    """Return the moving statistics of batch normalisation that cover this rank's batches only."""
    # Those of frozen layers are included: a step that was traced before still changes them.
    return [
        variable
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
        if layer.built and not layer.synchronized
        for variable in layer.non_trainable_variables
        if variable is not layer.gamma and variable is not layer.beta
    ]


def seed_states(layers: Iterable[keras.layers.Layer]) -> list[Any]:
    """Return the states of the random generators (dropout, …) in the layers, each once."""
    states = [g.state for layer in layers for g in getattr(layer, "_seed_generators", ())]
    return list({id(state): state for state in states}.values())


def recurrent_states(layers: Iterable[keras.layers.Layer]) -> list[Any]:
    """Return the states of stateful recurrent layers, which Keras does not track."""
    stateful = [layer for layer in layers if getattr(layer, "stateful", False)]
    states = flatten([getattr(layer, "states", None) for layer in stateful])
    return [state for state in states if isinstance(state, Variable)]


def of_each_rank(model: Any) -> list[Any]:
    """Return what differs by rank on purpose: states of generators, metrics and layers."""
    layers = list(model._flatten_layers())
    own = seed_states(layers)
    own += [v for metric in getattr(model, "metrics", ()) for v in metric.variables]
    own += recurrent_states(layers)
    for layer in layers:
        if getattr(layer, "stateful", False):  # the states of a recurrent layer
            own += layer.non_trainable_variables
    return own


def in_common(model: Any) -> list[Any]:
    """Return the variables whose values are equal on all ranks in training, in the same order.

    They are the weights of the model, and the scalars of its optimizers: learning rates and
    counters.
    """
    own = [*of_each_rank(model), *moving_statistics(model._flatten_layers())]
    rounds = model_ranks.rounds_of(model)
    found = []
    for optimizer in model_ranks.optimizers_of(model):
        own += getattr(innermost(optimizer), "_accumulated_gradients", ())  # until an update
        rate: Any = getattr(optimizer, "learning_rate", None)
        rates = [rate] if hasattr(rate, "assign") else []
        # In rounds a rank may skip an update.
        candidates = rates if rounds else [*variables_of(optimizer), *rates]
        found += [v for v in candidates if not tuple(v.shape)]
    # After the rates: a rate that differs is named, not what it moved.
    found += [v for one in rounds for v in one.variables()] if rounds else model.variables
    left_out = {shards.variable_id(v) for v in own}
    unique = {shards.variable_id(v): v for v in model_ranks.without_local(found)}
    return [v for number, v in unique.items() if number not in left_out]


def give_each_rank_its_own_randomness(states: Iterable[Any], process_set: ProcessSet) -> None:
    """Make equal seed states differ by rank, in the same way in each run."""
    # Otherwise all ranks would draw the same dropout masks. The state of the set's first rank stays
    # unchanged.
    if process_set.rank():
        for state in states:
            state.assign(of_this_rank(np.asarray(state), process_set))


def of_this_rank(state: Any, process_set: ProcessSet) -> Any:
    """Return the state of a generator, mixed with this rank."""
    seed, *rest = state.tolist()
    # A generator mixes well; seed + rank would collide with other seeds. A seed may be negative.
    mixed = np.random.default_rng((seed % 2**64, process_set.rank())).integers(2**31 - 1)
    return np.array([mixed, *rest], state.dtype)


def global_seed_states() -> list[Any]:
    """The state of the generator for ``keras.random`` without a seed, which is in no layer."""
    if is_legacy:
        return []
    home = importlib.import_module("keras.src.random.seed_generator")
    require(home, "global_seed_generator", "to give each rank its own randomness")
    drawn = random.getstate()  # by which Keras seeds it, and initializers
    try:
        return [home.global_seed_generator().state]
    finally:
        random.setstate(drawn)


def global_seeds() -> list[list[int]]:
    """Return the values of ``global_seed_states``, for files."""
    return [np.asarray(state).tolist() for state in global_seed_states()]


def set_global_seeds(values: list[list[int]]) -> None:
    """Set what ``global_seeds`` returned."""
    for state, value in zip(global_seed_states(), values, strict=True):
        state.assign(np.array(value, agree.numpy_dtype(state.dtype)))


#: The states of a backend's own generators, which ``keras.random`` does not use.
own_generators: list[Any] = []
