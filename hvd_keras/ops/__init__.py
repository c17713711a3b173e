"""The collectives, eager and in ``tf.function``: and their gradients.

Every rank of the process set must make the same calls; the k-th calls of one name on all ranks
belong together. In a ``tf.function`` calls run in the order in which they are written. Calls from
several Python threads need names.

All calls raise ``tf.errors.AbortedError`` if a rank has left the job, and
``tf.errors.DeadlineExceededError`` if a rank does not call for ``HVD_TIMEOUT_SECONDS``.

This package does not know Keras.
"""

from hvd_keras.ops.allreduce import allreduce, grouped_allreduce, is_reducing, reduce_tensors
from hvd_keras.ops.movement import (
    allgather,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_broadcast,
)
from hvd_keras.ops.reducescatter import grouped_reducescatter, reducescatter
from hvd_keras.ops.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from hvd_keras.ops.without_data import barrier, join

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reducescatter",
    "is_reducing",
    "join",
    "reduce_tensors",
    "reducescatter",
]
