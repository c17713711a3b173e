"""What ``horovod.tensorflow`` has for variables and objects.

A rank outside of the process set gets TensorFlow's error, as it does from the collectives.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvd_keras.horovod.collectives import check_included
from hvd_keras.ops import barrier_join, objects
from hvd_keras.process_sets import ProcessSet, global_process_set
from hvd_keras.training import variables as own


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """``hvd_keras.broadcast_variables``.

    Raises:
        tf.errors.InvalidArgumentError: this rank is not in the process set.
        As ``hvd_keras.broadcast_variables`` besides.
    """
    check_included("broadcast_variables", process_set)
    return own.broadcast_variables(variables, root_rank, process_set, inplace)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``hvd_keras.broadcast_object``.

    Raises:
        tf.errors.InvalidArgumentError: this rank is not in the process set.
        As ``hvd_keras.broadcast_object`` besides.
    """
    check_included("broadcast_object", process_set)
    return objects.broadcast_object(obj, root_rank, session, name, process_set)


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


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """``hvd_keras.allgather_object``.

    Raises:
        tf.errors.InvalidArgumentError: this rank is not in the process set.
        As ``hvd_keras.allgather_object`` besides.
    """
    check_included("allgather_object", process_set)
    return objects.allgather_object(obj, session, name, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """``hvd_keras.barrier``.

    Raises:
        tf.errors.InvalidArgumentError: this rank is not in the process set.
        As ``hvd_keras.barrier`` besides.
    """
    check_included("barrier", process_set)
    barrier_join.barrier(process_set)
