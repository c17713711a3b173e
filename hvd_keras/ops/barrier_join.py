"""Barrier and join: the collectives without data."""

from hvd_keras import rank_info
from hvd_keras.ops import validate
from hvd_keras.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the process set have called it.

    Args:
        process_set: the ranks that wait for each other.

    Raises:
        ValueError: this rank is not in the process set.
    """
    validate.check("barrier", process_set)
    validate.raw.hvd_barrier(
        tensor_name=validate.name("barrier", None, process_set), process_set=process_set.id()
    )


def join() -> int:
    """Declares that this rank has no more data, and waits until all ranks have done so.

    Meanwhile this rank takes part in the collectives of the others: with zeros in sums and averages
    (which still divide by ``size()``), with neutral values in the other reductions, with no rows in
    ``allgather``. ``broadcast`` from this rank, and ``alltoall``, fail on all ranks.

    Returns:
        The last rank to join.

    Raises:
        tf.errors.AbortedError: a rank has left the job without joining.
    """
    rank_info.rank()  # raises if hvd.init() was not called
    return int(validate.raw.hvd_join(tensor_name=""))
