"""Collectives without data, and this process's place as tensors."""

import tensorflow as tf

from hvd_keras import calls, runtime
from hvd_keras.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the process set have called it.

    Args:
        process_set: the ranks that wait for each other.

    Raises:
        ValueError: this rank is not in the process set.
    """
    calls.check("barrier", process_set)
    calls.raw.hvd_barrier(
        tensor_name=calls.name("barrier", None, process_set), process_set=process_set.id()
    )


def join() -> int:
    """Says that this rank has no more data, and waits until all ranks say so.

    Meanwhile it takes part in what the others call: with zeros in sums and averages (which still
    divide by ``size()``), with neutral values in the other reductions, with no rows in
    ``allgather``. ``broadcast`` from this rank, and ``alltoall``, fail on all ranks.

    Returns:
        The last rank to join.

    Raises:
        tf.errors.AbortedError: a rank has left the job without joining.
    """
    runtime.rank()  # says so, if init() was not called
    return int(calls.raw.hvd_join(tensor_name=""))


def rank_op(name: str | None = None) -> tf.Tensor:
    """``rank()`` as a tensor (int32), with its value when the graph runs.

    Args:
        name: of the TensorFlow op.
    """
    return calls.raw.hvd_rank_info(what="rank", name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """``local_rank()`` as a tensor (int32), with its value when the graph runs.

    Args:
        name: of the TensorFlow op.
    """
    return calls.raw.hvd_rank_info(what="local_rank", name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The size of a process set as a tensor (int32), with its value when the graph runs.

    Args:
        process_set_id: of a ``ProcessSet``; 0 is that of all ranks.
        name: of the TensorFlow op.

    Raises:
        tf.errors.FailedPreconditionError: (when it runs) there is no such process set.
    """
    return calls.raw.hvd_rank_info(what="size", process_set=process_set_id, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """``local_size()`` as a tensor (int32), with its value when the graph runs.

    Args:
        name: of the TensorFlow op.
    """
    return calls.raw.hvd_rank_info(what="local_size", name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set, otherwise 0, as a tensor (int32).

    Args:
        process_set_id: of a ``ProcessSet``.
        name: of the TensorFlow op.

    Raises:
        tf.errors.FailedPreconditionError: (when it runs) there is no such process set.
    """
    return calls.raw.hvd_rank_info(what="included", process_set=process_set_id, name=name)
