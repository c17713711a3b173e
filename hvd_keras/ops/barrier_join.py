"""Barrier and join: the collectives without data."""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.runtime import rank_info, xla
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

#: Make contexts in which a rank waits in ``join`` in eager code.
while_joined: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


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


def join() -> tf.Tensor:
    """Declare that this rank has no more data, and wait until all ranks have done so.

    Meanwhile this rank takes part in the collectives of the others. It contributes zeros to sums
    and averages (which still divide by ``size()``), neutral values to other reductions, and no rows
    to ``allgather``. ``broadcast`` from this rank, and ``alltoall``, fail on all ranks. What an
    optimizer has accumulated (``gradient_accumulation_steps``) is lost, with a warning, if other
    ranks update later.

    Returns:
        The last rank to join, an int32 scalar. In a TensorFlow 1 graph or a ``tf.function`` the
        rank joins when the tensor is computed.

    Raises:
        ValueError: ``init()`` was not called.
        NotImplementedError: the call is in a function that XLA compiles.
        tf.errors.AbortedError: a rank has left the job without joining.
        RuntimeError: accumulated gradients are lost, and ``HVD_STRICT`` is set.
    """
    rank_info.rank()  # raises if hvd.init() was not called
    if xla.is_compiling():
        raise NotImplementedError(
            "hvd.join cannot be compiled by XLA. Call it outside of functions with "
            "jit_compile=True."
        )
    with contextlib.ExitStack() as stack:
        for make_context in while_joined if tf.executing_eagerly() else ():
            stack.enter_context(make_context())
        return validate.raw.hvd_join(tensor_name="")
