"""``DistributedOptimizer`` as ``horovod.keras`` and ``horovod.tensorflow.keras`` have it.

One script runs on all ranks there: on a rank outside of the process set they do nothing.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hvd_keras.process_sets import ProcessSet, global_process_set
from hvd_keras.training import optimizer as distributed

_ARGUMENTS = inspect.signature(distributed.DistributedOptimizer)


def _or_alone(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of hvd_keras that leaves optimizers of ranks outside of the process set alone."""

    @functools.wraps(make)
    def make_or_leave(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if name != "local_layers"}
        given = _ARGUMENTS.bind(optimizer, *args, **options).arguments
        if not is_outside(given.get("process_set", global_process_set)):
            return make(optimizer, *args, **kwargs)
        optimizer.register_local_var = lambda variable: None  # all are local
        return optimizer

    return make_or_leave


DistributedOptimizer = _or_alone(distributed.DistributedOptimizer)
PartialDistributedOptimizer = _or_alone(distributed.PartialDistributedOptimizer)


def is_outside(process_set: ProcessSet) -> bool:
    """Whether the set has taken effect, and this rank is not in it."""
    return process_set.process_set_id is not None and not process_set.included()
