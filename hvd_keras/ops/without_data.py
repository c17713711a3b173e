"""Ops without data: barrier, and this rank's numbers, computed when the graph runs."""

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called it.

    Args:
        process_set: the ranks that wait for each other.

    Raises:
        ValueError: this rank is not in the process set.
    """
    validate.check("barrier", process_set)
    validate.raw.hvd_barrier(
        tensor_name=validate.name("barrier", None, process_set), process_set=process_set.id()
    )


def rank_op(name: str | None = None) -> tf.Tensor:
    """``rank()`` as an int32 scalar tensor, computed when the graph runs.

    Args:
        name: the name of the TensorFlow op.
    """
    return validate.raw.hvd_rank_info(what="rank", name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Do the same for ``local_rank()``."""
    return validate.raw.hvd_rank_info(what="local_rank", name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the size of a process set as an int32 scalar tensor, computed when the graph runs.

    Args:
        process_set_id: that of a ``ProcessSet``; 0 is the set of all ranks.
        name: the name of the TensorFlow op.

    Raises:
        tf.errors.FailedPreconditionError: (when it runs) there is no such process set.
    """
    return validate.raw.hvd_rank_info(what="size", process_set=process_set_id, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Do the same for ``local_size()``."""
    return validate.raw.hvd_rank_info(what="local_size", name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set, otherwise 0, as an int32 scalar tensor.

    Args:
        process_set_id: that of a ``ProcessSet``.
        name: the name of the TensorFlow op.

    Raises:
        tf.errors.FailedPreconditionError: (when it runs) there is no such process set.
    """
    return validate.raw.hvd_rank_info(what="included", process_set=process_set_id, name=name)
