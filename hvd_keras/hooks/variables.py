"""Creates, broadcasts, averages and lists the variables of a training.

A Sequential without ``Input`` and most subclassed models have no variables before Keras traces
their first step. Broadcasting, restoring checkpoints and seeding need them earlier.
"""

import contextlib
import importlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.compat import tensorflow_v1
from hvd_keras.gradients import agreement, division, missing_calls, model_ranks, shards
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import is_legacy, keras, require
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Assign the root rank's values to the variables of every rank.

    The states of random generators (dropout, augmentation) get the root's seed mixed with the rank,
    so that masks differ between ranks and a rerun repeats them.

    Args:
        variables: Keras variables or ``tf.Variable`` objects, in the same order on all ranks. Parts
            of tables that are divided between ranks, and optimizer slots of them, keep theirs.
        root_rank: the rank of the job whose values all ranks get.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's scripts; variables are always assigned.

    Returns:
        In a TensorFlow 1 graph, the op to run on every rank; otherwise None.

    Raises:
        ValueError: ``root_rank`` or this rank is not in the process set.
        TypeError: a variable has a dtype that is not supported.
        tf.errors.FailedPreconditionError: (on every rank) the ranks' variables differ in dtype,
            shape or number.
    """
    del inplace
    if not tf.executing_eagerly() and not tf.inside_function():
        return tensorflow_v1.broadcast_variables(variables, root_rank, process_set)
    process_set.check_included("broadcast_variables")
    variables = shards.without(variables)
    # In buckets like gradients: one request for many small variables.
    if not variables and process_set.size() > 1:
        missing_calls.warn_of_empty_broadcast(process_set)
    for number, bucket in enumerate(agreement.in_buckets(variables)):
        mine, name = list(map(tf.convert_to_tensor, bucket)), f"variables {number}"
        values = ops.grouped_broadcast(mine, root_rank, name, process_set)
        for variable, value in zip(bucket, values, strict=True):
            variable.assign(value)
        missing_calls.synchronized.add(*bucket)
    seeds = [v for v in variables if agreement.spec_of(v).path.endswith("seed_generator_state")]
    give_each_rank_its_own_randomness(seeds, process_set)
    return None


def of_training(model: Any) -> list[Any]:
    """Return the variables of a model and its optimizers, in the same order on all ranks."""
    # Builds the optimizer of compile if necessary. It cannot build others, such as a GAN's, because
    # it does not know which variables they update.
    found = list(model.variables)
    reducers = model_ranks.reducers_of(model)
    for optimizer in model_ranks.optimizers_of(model):
        # Not the default of compile, which updates nothing in a model with distributed optimizers.
        of_it = model_ranks.of_optimizer(optimizer)
        if optimizer is model.optimizer and (
            is_legacy or (not optimizer.built and (of_it is not None or not reducers))
        ):
            optimizer.build(model.trainable_variables)  # tf_keras skips this if it is built
        found += optimizer.variables
    return list({shards.variable_id(v): v for v in found}.values())


def average_variables(variables: list[Any], process_set: ProcessSet) -> None:
    """Assign to floating-point variables their mean over the ranks; equal ones keep every bit."""
    if process_set.size() == 1 or not variables:
        return
    mine = [tf.convert_to_tensor(v) for v in variables]
    # A mean of equal values may be rounded to another one; clipped to them it is not.
    smallest, means, largest = (
        ops.reduce_tensors(mine, op=op, name=f"variables' {op.value}s", process_set=process_set)
        for op in (ops.Min, ops.Average, ops.Max)
    )
    for variable, low, mean, high in zip(variables, smallest, means, largest, strict=True):
        variable.assign(tf.clip_by_value(mean, low, high))


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
    found: dict[int, Any] = {}
    for layer in layers:
        for generator in getattr(layer, "_seed_generators", ()):
            found[id(generator.state)] = generator.state
    return list(found.values())


def in_common(model: Any) -> list[Any]:
    """Return the variables whose values are equal on all ranks in training, in the same order.

    They are the weights of the model, and the scalars of its optimizers: learning rates and
    counters.
    """
    layers = list(model._flatten_layers())
    # What differs by rank on purpose: random states, statistics of the rank's own batches.
    own = [*seed_states(layers), *moving_statistics(layers)]
    own += [v for metric in getattr(model, "metrics", ()) for v in metric.variables]
    for layer in layers:
        if getattr(layer, "stateful", False):  # the states of a recurrent layer
            own += layer.non_trainable_variables
    found = []
    for optimizer in model_ranks.optimizers_of(model):
        rate = getattr(optimizer, "learning_rate", None)
        candidates = [*optimizer.variables, *([rate] if hasattr(rate, "assign") else [])]
        found += [v for v in candidates if not tuple(v.shape)]
    found += model.variables  # after the rates: a rate that differs is named, not what it moved
    left_out = {shards.variable_id(v) for v in own}
    unique = {shards.variable_id(v): v for v in model_ranks.without_local(found)}
    return [v for number, v in unique.items() if number not in left_out]


def give_each_rank_its_own_randomness(states: Iterable[Any], process_set: ProcessSet) -> None:
    """Make equal seed states differ by rank, in the same way in each run."""
    # Otherwise all ranks would draw the same dropout masks. The state of the set's first rank stays
    # unchanged.
    if process_set.rank() == 0 or division.is_on:  # which divides what one process draws
        return
    for state in states:
        value = tf.cast(tf.convert_to_tensor(state), tf.int64)
        # A generator mixes well; seed + rank would collide with other seeds.
        mixed = tf.random.stateless_uniform(
            [1], [value[0], process_set.rank()], maxval=2**31 - 1, dtype=tf.int64
        )
        state.assign(tf.cast(tf.concat([mixed, value[1:]], 0), state.dtype))


def global_seed_states() -> list[Any]:
    """The state of the generator for ``keras.random`` without a seed, which is in no layer."""
    if is_legacy:
        return []
    home = importlib.import_module("keras.src.random.seed_generator")
    require(home, "global_seed_generator", "to give each rank its own randomness")
    return [home.global_seed_generator().state]


# Layers that had no variables after a step of their model was traced: the model does not use them.
_unused: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def is_built(model: Any) -> bool:
    """Whether all layers that the model uses have their variables."""
    return unbuilt(model) <= _unused.get(model, set())


def unbuilt(model: Any) -> set[int]:
    """Return the ids of the layers that are not built."""
    return {id(layer) for layer in model._flatten_layers() if not layer.built}


def build(model: Any, element_spec: Any) -> Exception | None:
    """Create the variables of a compiled model, its metrics and its optimizers.

    Traces the model's own ``train_step``, if it has one, or else the forward pass, into a graph
    that never runs. Variables are created outside of the graph, as in every step that Keras traces.

    Args:
        element_spec: the spec of the argument of ``train_step``, a ``Dataset.element_spec``.

    Returns:
        The exception that the model raised, if it cannot be traced; then variables may be missing.
    """
    has_own_step = type(model).train_step is not keras.Model.train_step

    def forward(data: Any) -> None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        # As Keras's train_step calls it.
        if getattr(model, "_call_has_training_arg", True):
            model(x, training=True)
        else:
            model(x)

    def step(data: Any) -> None:
        model.train_step(data)

    # A step of the user's may use several optimizers; Keras's own needs the forward pass alone.
    traced = step if has_own_step else forward
    if hasattr(model, "_autoconvert_optionals"):
        traced = model._autoconvert_optionals(traced)
    with agree.within(agree.is_building, True):
        try:
            with _traced_functions():
                tf.function(traced, autograph=is_legacy).get_concrete_function(element_spec)
        except Exception as error:
            log.logger.debug(
                "model %s cannot be traced before its first step: %r", model.name, error
            )
            if has_own_step or not model.run_eagerly or not _call_on_zeros(model, element_spec):
                return error
    _unused[model] = unbuilt(model)
    return None


def _call_on_zeros(model: Any, element_spec: Any) -> bool:
    """Call an eager model that cannot be traced on a batch of one row of zeros."""

    def zeros(spec: tf.TensorSpec) -> tf.Tensor:
        return tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype)

    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    try:
        model(tf.nest.map_structure(zeros, x), training=False)
    except Exception as error:
        log.logger.debug("model %s cannot be called on zeros: %r", model.name, error)
        return False
    return True


@contextlib.contextmanager
def _traced_functions() -> Iterator[None]:
    """Traces functions even after ``tf.config.run_functions_eagerly(True)``."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(False)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
