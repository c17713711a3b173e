"""Optimizers, tape, ``load_model`` and callbacks as Horovod's modules have them.

One script runs on all ranks there: on a rank outside of the process set optimizers and tapes do
nothing. The arguments of the collectives of ``horovod.keras`` and ``horovod.tensorflow.keras``
differ from those of ``horovod.tensorflow``; in a TensorFlow 1 graph they return values, not tensors
of the graph.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import callbacks
from hvd_keras import optimizer as distributed
from hvd_keras.compat import tensorflow_v1
from hvd_keras.gradients import missing_calls, model_ranks, shards
from hvd_keras.horovod import collectives
from hvd_keras.horovod.collectives import in_order
from hvd_keras.layers import model_files
from hvd_keras.ops.reduction import Compression, Compressor
from hvd_keras.runtime import process_sets
from hvd_keras.runtime.keras import innermost, is_legacy, keras
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

_ARGUMENTS = inspect.signature(distributed.DistributedOptimizer)
_TAPE_ARGUMENTS = inspect.signature(distributed.DistributedGradientTape)


@functools.wraps(distributed.DistributedOptimizer)
def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
    """Distribute an optimizer as Horovod does: also one that is distributed already."""
    given = _ARGUMENTS.bind(optimizer, *args, **kwargs).arguments
    if distributed.is_distributed(innermost(optimizer)) and hasattr(optimizer, "from_config"):
        # Horovod makes a new optimizer each time, and leaves its argument as it is.
        has_set = hasattr(innermost(optimizer), "_hvd_accumulates")
        optimizer = type(optimizer).from_config(optimizer.get_config())
        if has_set:
            innermost(optimizer).gradient_accumulation_steps = None
    if not is_outside(given.get("process_set", global_process_set)):
        optimizer = distributed.DistributedOptimizer(optimizer, *args, **kwargs)
        if reducer := model_ranks.reducer_of(optimizer):
            reducer.averages_rows = False  # a mean of means, as Horovod's
        return optimizer
    optimizer.register_local_var = lambda variable: None  # all are local
    missing_calls.mark_alone(optimizer)
    return optimizer


@in_order(
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op groups process_set local_layers scale_local_gradients",
    like=distributed.DistributedOptimizer,
)
def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any, local_layers: Any = None, **arguments: Any
) -> Any:
    """``hvd_keras.PartialDistributedOptimizer``."""
    variables = distributed.local_variables(local_layers)
    partial = DistributedOptimizer(optimizer, **arguments)
    for variable in variables:
        partial.register_local_var(variable)
    return partial


def is_outside(process_set: ProcessSet) -> bool:
    """Whether the set has taken effect, and this rank is not in it."""
    process_sets.check_type(process_set, "DistributedOptimizer or hvd.DistributedGradientTape")
    return process_set.process_set_id is not None and not process_set.included()


def _value(result: Any) -> Any:
    """In a TensorFlow 1 graph what the session makes of a result."""
    if tf.executing_eagerly() or tf.inside_function():
        return result
    if is_legacy:
        return tf.compat.v1.keras.backend.get_session().run(result)
    session = tf.compat.v1.get_default_session()
    if session is not None:
        return session.run(result)
    with tf.compat.v1.Session() as own:
        return own.run(result)


def _on_values(function: Callable[..., Any], names: str) -> Callable[..., Any]:
    @in_order(f"value {names}", like=function)
    @functools.wraps(function)
    def call(value: Any, **given: Any) -> Any:
        return _value(function(value, **given))

    return call


allreduce = _on_values(
    collectives.allreduce, "name average prescale_factor postscale_factor op compression"
)
allgather = _on_values(collectives.allgather, "name")
broadcast = _on_values(collectives.broadcast, "root_rank name")
reducescatter = _on_values(collectives.reducescatter, "name op")


def broadcast_global_variables(root_rank: int) -> Any:
    """Assign the root's values to all global variables of the graph, at once."""
    return _value(tensorflow_v1.broadcast_global_variables(root_rank))


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback):  # type: ignore[misc]
    """That of ``hvd_keras``, which needs no ``device``: TensorFlow chooses."""

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__(root_rank, local_variables)

    def register_local_var(self, var: Any) -> None:
        """Let a variable keep its values."""
        self._local.append(var)


class MetricAverageCallback(callbacks.MetricAverageCallback):  # type: ignore[misc]
    """That of ``hvd_keras``, which needs no ``device``: TensorFlow chooses."""

    def __init__(self, device: str = "") -> None:
        super().__init__()


class LearningRateScheduleCallback(callbacks.LearningRateScheduleCallback):  # type: ignore[misc]
    """That of ``hvd_keras``, but a number is raised to the epochs since ``start_epoch``.

    So it is in Horovod's code; its documentation says that it holds.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        *args: Any,
        **others: Any,
    ) -> None:
        number = multiplier
        if not callable(number):
            multiplier = lambda epoch: number ** (epoch - start_epoch)  # noqa: E731
        super().__init__(initial_lr, multiplier, start_epoch, *args, **others)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint(save_best_only=True)`` without a path.

    Horovod's Spark estimators set the path; without them, set ``callback.filepath``.

    Raises:
        ValueError: (in ``fit``) the path is missing.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        path = "best.weights.h5" if save_weights_only else "best.keras"  # Keras requires one
        super().__init__(path, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint: filepath is None, and no Spark estimator sets it here. Set "
                "it before fit: callback.filepath = 'best.keras'."
            )
        super().on_train_begin(logs)


@in_order(
    "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients "
    "num_groups groups process_set scale_local_gradients",
    like=distributed.DistributedOptimizer,
)
def optimizer_of_tensorflow(optimizer: Any, use_locking: Any = None, **arguments: Any) -> Any:
    """``hvd_keras.DistributedOptimizer`` with the arguments of ``horovod.tensorflow``.

    ``use_locking`` has no effect: the optimizer itself has such an argument.
    """
    del use_locking
    return DistributedOptimizer(optimizer, **arguments)


class DistributedGradientTape(distributed.DistributedGradientTape):
    """``hvd_keras.DistributedGradientTape``; on a rank outside of the process set a plain tape."""

    def __init__(self, gradtape: tf.GradientTape, *args: Any, **kwargs: Any) -> None:
        given = _TAPE_ARGUMENTS.bind(gradtape, *args, **kwargs).arguments
        self._alone = is_outside(given.get("process_set", global_process_set))
        if self._alone:
            del given["process_set"]
        super().__init__(**given)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        kwargs["output_gradients"] = output_gradients
        if self._alone:
            missing_calls.mark_reduced(tf.nest.flatten(sources), by_tape=True)
            return self._tape.gradient(target, sources, **kwargs)
        return super().gradient(target, sources, **kwargs)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of ``gradient`` in two lists, both in the order of ``sources``.

        The first has the sources that were registered as local, the other one all others, with
        their gradients over all ranks.
        """
        gradients = self.gradient(target, sources, output_gradients)
        own = {shards.variable_id(source) for source in self._local}
        pairs: tuple[list[Any], list[Any]] = [], []
        for source, gradient in zip(sources, gradients, strict=True):
            pairs[shards.variable_id(source) not in own].append((source, gradient))
        return pairs


@in_order(
    "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
    "num_groups groups process_set local_layers scale_local_gradients",
    like=distributed.DistributedOptimizer,
)
def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: Any, local_layers: Any = None, **arguments: Any
) -> DistributedGradientTape:
    """``hvd_keras.PartialDistributedGradientTape``."""
    variables = distributed.local_variables(local_layers)
    partial = DistributedGradientTape(gradtape, **arguments)
    for variable in variables:
        partial.register_local_source(variable)
    return partial


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    **others: Any,
) -> Any:
    """``hvd_keras.load_model``; needs no ``legacy_opts``: the file names the optimizer's class.

    ``others`` are those that only ``hvd_keras.load_model`` has.
    """
    del legacy_opts
    objects = custom_optimizers, custom_objects
    model = model_files.load_model(filepath, *objects, compression, **others)
    for reducer in model_ranks.reducers_of(model):
        reducer.averages_rows = False  # as DistributedOptimizer
    return model
