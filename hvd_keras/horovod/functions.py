"""What ``horovod.tensorflow`` has for variables and objects.

A rank outside of the process set gets TensorFlow's error, as it does from the collectives.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_keras.horovod.collectives import check_included
from hvd_keras.ops import barrier_join, objects
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.training import variables

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _checked(function: _Function) -> _Function:
    """The function, which raises ``InvalidArgumentError`` outside of its process set."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        check_included(function.__name__, given.arguments["process_set"])
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


broadcast_variables = _checked(variables.broadcast_variables)
broadcast_object = _checked(objects.broadcast_object)
allgather_object = _checked(objects.allgather_object)
barrier = _checked(barrier_join.barrier)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """``broadcast_object`` with all arguments except the object.

    Raises:
        As ``broadcast_object``, when it is called.
    """
    return functools.partial(
        broadcast_object, root_rank=root_rank, session=session, name=name, process_set=process_set
    )
