"""One rank's variables for all."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import log, ops, settings
from hvd_keras._keras import is_legacy, keras
from hvd_keras.compat import tensorflow_v1
from hvd_keras.process_sets import ProcessSet, global_process_set
from hvd_keras.training import exchange, forgotten, reducer


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Assigns the root's values to the variables of every rank.

    Args:
        variables: Keras variables or ``tf.Variable``s, in the same order on all ranks.
        root_rank: the rank, of the job, whose values all get.
        process_set: the ranks that take part.
        inplace: Horovod's; variables are always assigned to.

    Returns:
        In a TensorFlow 1 graph the op that does it, to be run on every rank; otherwise None.

    Raises:
        ValueError: there is no such rank, or this rank is not in the process set.
        TypeError: a variable has a dtype that cannot travel.
        tf.errors.FailedPreconditionError: the ranks' variables differ in dtype, shape or number; on
            every rank.
    """
    del inplace
    if not tf.executing_eagerly() and not tf.inside_function():
        return tensorflow_v1.broadcast_variables(variables, root_rank, process_set)
    process_set.check_included("broadcast_variables")
    variables = list(variables)
    if not variables and process_set.size() > 1:
        log.warn_once(
            "hvd.broadcast_variables got no variables, so the ranks keep their own. If the model "
            "is not built yet, call it once on a batch of data first, or use "
            "hvd.callbacks.BroadcastGlobalVariablesCallback in fit()."
        )
    bucket: list[Any] = []
    size = number = 0
    for variable in variables:
        bucket.append(variable)
        size += exchange.size_in_bytes(exchange.spec_of(variable))
        if size >= settings.read().bucket_bytes:
            _broadcast(bucket, root_rank, number, process_set)
            bucket, size, number = [], 0, number + 1
    _broadcast(bucket, root_rank, number, process_set)
    return None


def of_training(model: Any) -> list[Any]:
    """The variables of a model and its optimizers, in one order.

    Builds the optimizer of ``compile``, if it is not: for others, as GANs have them, it is not
    known what they update.
    """
    found = list(model.variables)
    for optimizer in reducer.optimizers_of(model):
        if optimizer is model.optimizer and (
            is_legacy or (not optimizer.built and not _updates_nothing(model, optimizer))
        ):
            optimizer.build(model.trainable_variables)  # tf_keras knows by itself
        found += optimizer.variables
    return list({exchange.variable_id(v): v for v in found}.values())


def _updates_nothing(model: Any, optimizer: Any) -> bool:
    """Whether it is the default that ``compile`` makes for models with optimizers of their own."""
    return reducer.of_optimizer(optimizer) is None and bool(reducer.reducers_of(model))


def mark_restored(model: Any, restored: bool) -> None:
    """Whether this ``fit`` began with a checkpoint, which nothing shall overwrite."""
    model._hvd_restored = restored


def is_restored(model: Any) -> bool:
    """As marked by ``mark_restored``."""
    return getattr(model, "_hvd_restored", False)


def _broadcast(variables: list[Any], root_rank: int, number: int, process_set: ProcessSet) -> None:
    if not variables:
        return
    values = ops.grouped_broadcast(
        [tf.convert_to_tensor(v) for v in variables], root_rank, f"variables {number}", process_set
    )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    forgotten.mark_synchronized(variables)


def average_variables(variables: list[Any], process_set: ProcessSet) -> None:
    """Assigns the mean over the ranks to floating-point variables."""
    if process_set.size() == 1 or not variables:
        return
    means = ops.grouped_allreduce(
        [tf.convert_to_tensor(v) for v in variables],
        op=ops.Average,
        name="variables' means",
        process_set=process_set,
    )
    for variable, mean in zip(variables, means, strict=True):
        variable.assign(mean)


def moving_statistics(layers: Iterable[keras.layers.Layer]) -> list[Any]:
    """The variables in which batch normalisation keeps the means of what this rank has seen.

    Those of frozen layers do not move, so they are equal on all ranks.
    """
    return [
        variable
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
        if layer.built and layer.trainable and not layer.synchronized
        for variable in layer.non_trainable_variables
        if variable is not layer.gamma and variable is not layer.beta
    ]


def seed_states(layers: Iterable[keras.layers.Layer]) -> list[Any]:
    """The state of each random generator (dropout, augmentation) in the layers, without repeats."""
    found: dict[int, Any] = {}
    for layer in layers:
        for generator in getattr(layer, "_seed_generators", ()):
            found[id(generator.state)] = generator.state
    return list(found.values())


def give_each_rank_its_own_randomness(states: Iterable[Any], process_set: ProcessSet) -> None:
    """Makes equal seed states differ by rank, in a way that a rerun repeats.

    Equal dropout masks on all ranks would waste the ranks. The state of the set's first rank is
    left as it is.
    """
    if process_set.rank() == 0:
        return
    for state in states:
        seed, *rest = np.asarray(state)
        # A seed sequence gives well-mixed words, where seed + rank would collide with another seed.
        mixed = np.random.SeedSequence([int(seed), process_set.rank()]).generate_state(
            1, np.uint32
        )[0]
        state.assign(np.array([mixed >> 1, *rest], dtype=state.dtype))


def random_state() -> dict[str, Any]:
    """Of the global generators of Python and NumPy in this process, as JSON can hold it."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"python": [version, words, gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def set_random_state(state: dict[str, Any]) -> None:
    """What ``random_state`` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
