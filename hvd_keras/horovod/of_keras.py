"""What ``horovod.keras`` and ``horovod.tensorflow.keras`` have: optimizers and collectives.

One script runs on all ranks there: on a rank outside of the process set optimizers do nothing. The
collectives' arguments differ from those of ``horovod.tensorflow``; in a TensorFlow 1 graph they
return values, not tensors of the graph.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras import optimizer as distributed
from hvd_keras.compat import tensorflow_v1
from hvd_keras.gradients import missing_calls, model_ranks
from hvd_keras.horovod import collectives
from hvd_keras.runtime.keras import is_legacy
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

_ARGUMENTS = inspect.signature(distributed.DistributedOptimizer)


def in_order(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function: it gets these arguments, in this order, with hvd_keras's defaults.

    Args:
        names: separated by spaces; the default of those that hvd_keras lacks is None.
    """
    known = _ARGUMENTS.parameters
    signature = inspect.Signature(
        [
            known[name].replace(annotation=inspect.Parameter.empty)
            if name in known
            else inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
            for name in names.split()
        ]
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(**signature.bind(*args, **kwargs).arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


@functools.wraps(distributed.DistributedOptimizer)
def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
    """Distribute an optimizer as Horovod does: also one that is distributed already."""
    given = _ARGUMENTS.bind(optimizer, *args, **kwargs).arguments
    if distributed.is_distributed(optimizer) and hasattr(optimizer, "from_config"):
        # Horovod makes a new optimizer each time.
        optimizer = type(optimizer).from_config(optimizer.get_config())
    if not is_outside(given.get("process_set", global_process_set)):
        optimizer = distributed.DistributedOptimizer(optimizer, *args, **kwargs)
        if reducer := model_ranks.of_optimizer(optimizer):
            reducer.is_horovods = True
        return optimizer
    optimizer.register_local_var = lambda variable: None  # all are local
    missing_calls.mark_alone(optimizer)
    return optimizer


@in_order(
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op groups process_set local_layers scale_local_gradients"
)
def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any, local_layers: Any = None, **arguments: Any
) -> Any:
    """``hvd_keras.PartialDistributedOptimizer``.

    Raises:
        As ``hvd_keras.PartialDistributedOptimizer``.
    """
    variables = distributed.local_variables(local_layers)
    partial = DistributedOptimizer(optimizer, **arguments)
    for variable in variables:
        partial.register_local_var(variable)
    return partial


def is_outside(process_set: ProcessSet) -> bool:
    """Whether the set has taken effect, and this rank is not in it."""
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
    return collectives.in_order(
        function, f"value {names}", lambda value, given: _value(function(value, **given))
    )


allreduce = _on_values(
    collectives.allreduce, "name average prescale_factor postscale_factor op compression"
)
allgather = _on_values(collectives.allgather, "name")
broadcast = _on_values(collectives.broadcast, "root_rank name")
reducescatter = _on_values(collectives.reducescatter, "name op")


def broadcast_global_variables(root_rank: int) -> Any:
    """Assign the root's values to all global variables of the graph, at once.

    Args:
        root_rank: the rank whose values all get.

    Raises:
        As ``hvd_keras.broadcast_global_variables``.
    """
    return _value(tensorflow_v1.broadcast_global_variables(root_rank))
