"""Data-parallel training for Keras: Horovod's API on today's TensorFlow and Keras.

Four lines make a Keras script train on several processes::

    import hvd_keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer=optimizer, loss=...)
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Start it with ``hvdrun -np 4 python train.py``.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_keras import callbacks as callbacks  # type: ignore[attr-defined]
    from hvd_keras import data as data
    from hvd_keras.built import ccl_built as ccl_built
    from hvd_keras.built import cuda_built as cuda_built
    from hvd_keras.built import ddl_built as ddl_built
    from hvd_keras.built import gloo_built as gloo_built
    from hvd_keras.built import gloo_enabled as gloo_enabled
    from hvd_keras.built import mpi_built as mpi_built
    from hvd_keras.built import mpi_enabled as mpi_enabled
    from hvd_keras.built import mpi_threads_supported as mpi_threads_supported
    from hvd_keras.built import nccl_built as nccl_built
    from hvd_keras.built import rocm_built as rocm_built
    from hvd_keras.compression import Compression as Compression
    from hvd_keras.compression import Compressor as Compressor
    from hvd_keras.launch.run_function import run as run
    from hvd_keras.learning_rates import linear_scaling as linear_scaling
    from hvd_keras.learning_rates import sqrt_scaling as sqrt_scaling
    from hvd_keras.loading import load_model as load_model
    from hvd_keras.meeting import barrier as barrier
    from hvd_keras.meeting import join as join
    from hvd_keras.meeting import local_rank_op as local_rank_op
    from hvd_keras.meeting import local_size_op as local_size_op
    from hvd_keras.meeting import process_set_included_op as process_set_included_op
    from hvd_keras.meeting import rank_op as rank_op
    from hvd_keras.meeting import size_op as size_op
    from hvd_keras.membership import add_process_set as add_process_set
    from hvd_keras.membership import remove_process_set as remove_process_set
    from hvd_keras.objects import allgather_object as allgather_object
    from hvd_keras.objects import broadcast_object as broadcast_object
    from hvd_keras.objects import broadcast_object_fn as broadcast_object_fn
    from hvd_keras.observe import start_timeline as start_timeline
    from hvd_keras.observe import stats as stats
    from hvd_keras.observe import stop_timeline as stop_timeline
    from hvd_keras.ops import Adasum as Adasum
    from hvd_keras.ops import Average as Average
    from hvd_keras.ops import Max as Max
    from hvd_keras.ops import Min as Min
    from hvd_keras.ops import Product as Product
    from hvd_keras.ops import ReduceOp as ReduceOp
    from hvd_keras.ops import Sum as Sum
    from hvd_keras.ops import allgather as allgather
    from hvd_keras.ops import allreduce as allreduce
    from hvd_keras.ops import broadcast as broadcast
    from hvd_keras.ops import grouped_allgather as grouped_allgather
    from hvd_keras.ops import grouped_allreduce as grouped_allreduce
    from hvd_keras.optimizer import DistributedOptimizer as DistributedOptimizer
    from hvd_keras.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
    from hvd_keras.process_sets import ProcessSet as ProcessSet
    from hvd_keras.process_sets import global_process_set as global_process_set
    from hvd_keras.runtime import cross_rank as cross_rank
    from hvd_keras.runtime import cross_size as cross_size
    from hvd_keras.runtime import init as init
    from hvd_keras.runtime import is_homogeneous as is_homogeneous
    from hvd_keras.runtime import is_initialized as is_initialized
    from hvd_keras.runtime import local_rank as local_rank
    from hvd_keras.runtime import local_size as local_size
    from hvd_keras.runtime import rank as rank
    from hvd_keras.runtime import shutdown as shutdown
    from hvd_keras.runtime import size as size
    from hvd_keras.scatter import alltoall as alltoall
    from hvd_keras.scatter import grouped_reducescatter as grouped_reducescatter
    from hvd_keras.scatter import reducescatter as reducescatter
    from hvd_keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
    from hvd_keras.tape import DistributedGradientTape as DistributedGradientTape
    from hvd_keras.tape import PartialDistributedGradientTape as PartialDistributedGradientTape
    from hvd_keras.tensorflow_v1 import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
    from hvd_keras.tensorflow_v1 import broadcast_global_variables as broadcast_global_variables
    from hvd_keras.variables import broadcast_variables as broadcast_variables

__version__ = "0.1.0"

# Where each public name lives. Loaded when first used, so that hvdrun, which lives in this package
# too, starts without TensorFlow.
_HOME = {
    **dict.fromkeys(("Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"), "ops"),
    **dict.fromkeys(("allgather", "allreduce", "broadcast"), "ops"),
    **dict.fromkeys(("grouped_allgather", "grouped_allreduce"), "ops"),
    **dict.fromkeys(("alltoall", "reducescatter", "grouped_reducescatter"), "scatter"),
    **dict.fromkeys(("barrier", "join", "process_set_included_op"), "meeting"),
    **dict.fromkeys(("rank_op", "size_op", "local_rank_op", "local_size_op"), "meeting"),
    **dict.fromkeys(("ProcessSet", "global_process_set"), "process_sets"),
    **dict.fromkeys(("add_process_set", "remove_process_set"), "membership"),
    **dict.fromkeys(("mpi_built", "mpi_enabled", "mpi_threads_supported"), "built"),
    **dict.fromkeys(("nccl_built", "cuda_built", "rocm_built"), "built"),
    **dict.fromkeys(("gloo_built", "gloo_enabled", "ddl_built", "ccl_built"), "built"),
    **dict.fromkeys(("Compression", "Compressor"), "compression"),
    **dict.fromkeys(("DistributedOptimizer", "PartialDistributedOptimizer"), "optimizer"),
    **dict.fromkeys(("allgather_object", "broadcast_object", "broadcast_object_fn"), "objects"),
    **dict.fromkeys(("linear_scaling", "sqrt_scaling"), "learning_rates"),
    "load_model": "loading",
    "run": "launch.run_function",
    **dict.fromkeys(("stats", "start_timeline", "stop_timeline"), "observe"),
    "SyncBatchNormalization": "sync_batch_norm",
    **dict.fromkeys(("init", "is_initialized", "shutdown", "rank", "size"), "runtime"),
    "is_homogeneous": "runtime",
    **dict.fromkeys(("local_rank", "local_size", "cross_rank", "cross_size"), "runtime"),
    **dict.fromkeys(("DistributedGradientTape", "PartialDistributedGradientTape"), "tape"),
    "broadcast_variables": "variables",
    "BroadcastGlobalVariablesHook": "tensorflow_v1",
    "broadcast_global_variables": "tensorflow_v1",
}

_MODULES = ("callbacks", "data")

__all__ = [*_MODULES, *_HOME]

if importlib.util.find_spec("hvd_keras.callbacks") is None:
    raise ImportError(
        f"hvd_keras was imported from its source folder, {__path__[0]}, where it is not complete. "
        "Run 'pip install -e .' there, or start Python from another directory."
    )


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hvd_keras.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'hvd_keras' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hvd_keras.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
