"""``hvd.join``: a rank that has no more data takes part in what the others exchange."""

import weakref
from typing import Any

import tensorflow as tf

from hvd_keras.gradients import comparison, missing_calls
from hvd_keras.ops import validate
from hvd_keras.runtime import rank_info

#: Distributed optimizers that accumulate gradients before they are exchanged, and how many steps
#: they had made when this rank last joined.
accumulating: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def join() -> tf.Tensor:
    """Declare that this rank has no more data, and wait until all ranks have done so.

    Meanwhile this rank takes part in the collectives of the others. It contributes zeros to sums
    and averages (which still divide by ``size()``), neutral values to other reductions, and no rows
    to ``allgather``. ``broadcast`` from this rank, and ``alltoall``, fail on all ranks. What an
    optimizer has accumulated (``gradient_accumulation_steps``) is lost if other ranks update later,
    with a warning unless the call is in a graph.

    It misses the others' updates. To train on, first give all ranks the variables of the rank that
    this returns: ``hvd.broadcast_variables(model.variables, root_rank=int(hvd.join()))``, and the
    same for ``optimizer.variables``. Otherwise one of the next steps fails, unless XLA compiles it.

    Returns:
        The last rank to join, an int32 scalar. In a TensorFlow 1 graph or a ``tf.function`` the
        rank joins when the tensor is computed; TensorFlow may do that before a loop over a dataset
        that precedes the call, so make it outside of a function that has such a loop.

    Raises:
        ValueError: ``init()`` was not called.
        NotImplementedError: the call is in a function that XLA compiles.
        tf.errors.AbortedError: a rank has left the job without joining.
        RuntimeError: accumulated gradients are lost, and ``HVD_STRICT`` is set.
    """
    rank_info.rank()  # raises if hvd.init() was not called
    if validate.is_compiling():
        raise NotImplementedError(
            "hvd.join cannot be compiled by XLA. Call it outside of functions with "
            "jit_compile=True."
        )
    before = missing_calls.count("requests", ["allreduce"]) if accumulating else 0
    last = validate.raw.hvd_join(tensor_name="")
    with tf.control_dependencies([last]):
        comparison.restart_all()
    if not accumulating or not tf.executing_eagerly():
        return last
    others_went_on = missing_calls.count("requests", ["allreduce"]) != before
    for optimizer, then in list(accumulating.items()):
        made = accumulating[optimizer] = int(optimizer._iterations)  # local steps
        every = optimizer.gradient_accumulation_steps
        steps = made % every
        if others_went_on and made != then and steps:
            missing_calls.tell(
                f"rank {rank_info.rank()} has joined (hvd.join) with the gradients of {steps} of "
                f"{every} steps that its {type(optimizer).__name__} accumulates. They are lost, so "
                "the last update is not that of one process. Let each rank make a multiple of "
                f"{every} steps before hvd.join.",
                kind=RuntimeError,
            )
    return last
