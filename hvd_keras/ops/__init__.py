"""The collectives, eager and in ``tf.function``: and their gradients.

Every rank of the process set must make the same calls; the k-th calls of one name on all ranks
belong together. In a ``tf.function`` calls run in the order in which they are written. Calls from
several Python threads need names.

All calls raise ``tf.errors.AbortedError`` if a rank has left the job, and
``tf.errors.DeadlineExceededError`` if a rank does not call for ``HVD_TIMEOUT_SECONDS``.

This package does not know Keras.
"""

from hvd_keras.runtime import settings

if settings.keras_backend() != "tensorflow":
    raise RuntimeError(
        "this module of hvd_keras needs Keras on TensorFlow, and another backend is chosen. Write "
        "'import hvd_keras as hvd', and hvd.callbacks, hvd.data, hvd.allreduce, …"
    )

from hvd_keras.ops.allreduce import allreduce as allreduce
from hvd_keras.ops.allreduce import grouped_allreduce as grouped_allreduce
from hvd_keras.ops.allreduce import has_reduced as has_reduced
from hvd_keras.ops.allreduce import is_reduced as is_reduced
from hvd_keras.ops.allreduce import reduce_tensors as reduce_tensors
from hvd_keras.ops.allreduce import wait_for as wait_for
from hvd_keras.ops.movement import allgather as allgather
from hvd_keras.ops.movement import allgather_rows as allgather_rows
from hvd_keras.ops.movement import alltoall as alltoall
from hvd_keras.ops.movement import broadcast as broadcast
from hvd_keras.ops.movement import grouped_allgather as grouped_allgather
from hvd_keras.ops.movement import grouped_broadcast as grouped_broadcast
from hvd_keras.ops.reducescatter import grouped_reducescatter as grouped_reducescatter
from hvd_keras.ops.reducescatter import reducescatter as reducescatter
from hvd_keras.ops.without_data import barrier as barrier
from hvd_keras.runtime.reductions import Adasum as Adasum
from hvd_keras.runtime.reductions import Average as Average
from hvd_keras.runtime.reductions import Max as Max
from hvd_keras.runtime.reductions import Min as Min
from hvd_keras.runtime.reductions import Product as Product
from hvd_keras.runtime.reductions import ReduceOp as ReduceOp
from hvd_keras.runtime.reductions import Sum as Sum
