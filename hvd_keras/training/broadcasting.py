"""Creates and broadcasts the variables of a training, on TensorFlow.

A Sequential without ``Input`` and most subclassed models have no variables before Keras traces
their first step. Broadcasting, restoring checkpoints and seeding need them earlier.
"""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.compat import tensorflow_v1
from hvd_keras.gradients import missing_calls, shards, specs
from hvd_keras.runtime import agree, log, process_sets
from hvd_keras.runtime.keras import is_legacy, is_of_keras, keras, overrides
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.training.variables import of_this_rank, unbuilt, unused


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
    process_sets.check(process_set, "broadcast_variables")
    variables = list(variables) if isinstance(variables, Iterable) else [variables]
    for one in variables:
        if not hasattr(one, "assign"):
            raise TypeError(
                f"hvd.broadcast_variables: got a {type(one).__name__}, expected variables, such as "
                "model.variables."
            )
    variables = shards.without(variables)
    # In buckets like gradients: one request for many small variables.
    if not variables and process_set.size() > 1:
        missing_calls.warn_of_empty_broadcast(process_set)
    for number, bucket in enumerate(specs.in_buckets(variables)):
        mine, name = list(map(tf.convert_to_tensor, bucket)), f"variables {number}"
        values = ops.grouped_broadcast(mine, root_rank, name, process_set)
        for variable, before, value in zip(bucket, mine, values, strict=True):
            variable.assign(value)
            _tell_if_derived(variable, before, value)
        missing_calls.synchronized.add(*bucket)
    seeds = [v for v in variables if specs.spec_of(v).path.endswith("seed_generator_state")]
    if process_set.rank():
        for state in seeds:  # in a tf.function, too
            value = tf.convert_to_tensor(state)
            mixed = tf.numpy_function(lambda x: of_this_rank(x, process_set), [value], value.dtype)
            state.assign(tf.ensure_shape(mixed, value.shape))
    return None


def _tell_if_derived(variable: Any, before: Any, value: Any) -> None:
    """Tell that a ``Normalization`` layer computes with what it has made of other values."""
    learns = specs.spec_of(variable).path.endswith("/mean")
    is_loop = tf.executing_eagerly() and not (missing_calls.in_fit.get() or variable.trainable)
    if learns and is_loop and not np.array_equal(before, value):
        log.warn_once(
            f"hvd.broadcast_variables has changed {specs.spec_of(variable).path}. If that is of a "
            "Normalization layer, it computes with numbers from before: call "
            "hvd.broadcast_preprocessing(model), too."
        )


def build(model: Any, element_spec: Any, whole_step: bool = False) -> Exception | None:
    """Create the variables of a compiled model, its metrics and its optimizers.

    Traces the step, if the model has a ``train_step`` or ``compute_loss`` of its own, or else the
    forward pass, into a graph that never runs. Variables are created outside of the graph, as in
    every step that Keras traces. An eager step of one's own, of which Python sees each call, is
    traced only if calling the model does not build all layers.

    Args:
        element_spec: the spec of the argument of ``train_step``, a ``Dataset.element_spec``.
        whole_step: trace Keras's own step, too, which creates the variables of metrics.

    Returns:
        The exception that the model raised, if it cannot be traced; then variables may be missing.
    """
    has_own_step = overrides(model, "train_step", "compute_loss")

    def forward(data: Any) -> None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        # As Keras's train_step calls it.
        options = {"training": True} if getattr(model, "_call_has_training_arg", True) else {}
        model(x, **options)

    def step(data: Any) -> None:
        model.train_step(data)

    # A step of the user's may use several optimizers; Keras's own needs the forward pass alone.
    traced = step if has_own_step or whole_step else forward
    is_eager = model.run_eagerly or tf.config.functions_run_eagerly()
    if is_eager and has_own_step and not (whole_step or is_legacy):
        with _building(), contextlib.suppress(Exception):
            tf.function(forward, autograph=False).get_concrete_function(element_spec)
        if not unbuilt(model):
            return None
    if hasattr(model, "_autoconvert_optionals"):
        traced = model._autoconvert_optionals(traced)
    failure = None
    with _building():
        try:
            tf.function(traced, autograph=is_legacy).get_concrete_function(element_spec)
        except Exception as error:
            log.logger.debug("%s cannot be traced before its step: %r", model.name, error)
            failure = error
        if failure is not None and model.run_eagerly and not has_own_step:
            failure = None if _call_on_zeros(model, element_spec) else failure
    if failure is None:
        unused[model] = unbuilt(model)
    return failure


#: The class of what ``tf.function`` returns.
function_class: Any = type(tf.function(lambda: None))
# Returns what is called in place of a ``tf.function`` of a script.
_clone_of: contextvars.ContextVar[Any] = contextvars.ContextVar("clone of a function", default=None)


class _Clones:
    """Returns the same clone of a ``tf.function`` each time, which has traced nothing.

    The function keeps it, as those of a method for each instance, so that both are forgotten if
    each step makes the function anew, and the clone with this object.
    """

    def __call__(self, function: Any) -> Any:
        kept = function._descriptor_cache
        if self not in kept:
            kept[self] = function._clone(None)
        return kept[self]


def with_clones(model: Any, kind: Any) -> AbstractContextManager[None]:
    """Let a kind of step of a model have its own traces of the functions that it calls.

    Others that call them, too, such as those of validation, weigh losses in another way.
    """
    if agree.is_building.get():  # which forgets them
        return contextlib.nullcontext()
    clones = vars(model).setdefault("_hvd_clones", {})
    return agree.within(_clone_of, clones.setdefault(kind, _Clones()))


def call_function(call: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Replace the ``__call__`` of what ``tf.function`` returns."""
    clone = _clone_of.get()
    # Those of files, of a derived class, have been traced.
    is_own = clone is not None and type(function) is function_class
    return call(clone(function) if is_own else function, *args, **kwargs)


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """Let steps change nothing, and each tf.function of a script forget what it traces here.

    It would run that in the training, too, where gradients are exchanged.
    """
    with agree.within(agree.is_building, True), agree.within(_clone_of, _Clones()):
        yield


def build_step(model: Any, element_spec: Any) -> None:
    """Create what Keras's own step creates in its first trace, so that no second one is needed.

    These are the variables of the optimizer, of the compiled metrics and of the metrics that Keras
    makes of the losses of several outputs. ``tf.function`` traces a step again that has created
    variables: half of the time until the first step ends.
    """
    is_own = overrides(model, "train_step", "compute_loss", "compute_metrics")
    if is_own or model.run_eagerly or not model.trainable_variables:
        return
    if not getattr(model.optimizer, "built", True):
        model.optimizer.build(model.trainable_variables)
    metrics, losses = model._compile_metrics, model._compile_loss
    waits = metrics is not None and not metrics.built
    is_known = is_of_keras(type(model).call)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(element_spec)

    def update(x: Any, y: Any, y_pred: Any, weight: Any) -> None:
        y_pred = y_pred if is_known else model(x, training=True)
        if keras.tree.is_nested(y_pred) and losses is not None:
            losses(y, y_pred, weight)
        if waits:
            metrics.update_state(y, y_pred, weight)

    def outputs() -> Any:
        is_single = isinstance(model, keras.Sequential) and len(model.outputs) == 1
        outputs = model.outputs[0] if is_single else model.output  # nested
        return keras.tree.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), outputs)

    with _building():
        try:
            given = outputs() if is_known else None
            several = keras.tree.is_nested(given if is_known else y)
            if waits or (several and losses is not None and not losses.built):
                tf.function(update, autograph=False).get_concrete_function(x, y, given, weight)
        except Exception as error:  # the step will raise it, or create them
            log.logger.debug("metrics cannot be made before the first step: %r", error)


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
