"""The public names and their modules, for type checkers, editors and ``__init__.py``."""

# Its folder is another one, which mypy finds in some orders of reading only.
from hvd_keras import callbacks as callbacks  # type: ignore[attr-defined,unused-ignore]
from hvd_keras import data as data
from hvd_keras import layers as layers
from hvd_keras import ray as ray
from hvd_keras import spark as spark
from hvd_keras.auto.start import auto as auto
from hvd_keras.compat.tensorflow_v1 import (
    BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
)
from hvd_keras.compat.tensorflow_v1 import broadcast_global_variables as broadcast_global_variables
from hvd_keras.gradients.joining import join as join
from hvd_keras.gradients.missing_calls import local_fit as local_fit
from hvd_keras.launch.run_function import run as run
from hvd_keras.layers.model_files import load_model as load_model
from hvd_keras.layers.model_files import save_model as save_model
from hvd_keras.lifecycle import init as init
from hvd_keras.lifecycle import shutdown as shutdown
from hvd_keras.observe import start_timeline as start_timeline
from hvd_keras.observe import stats as stats
from hvd_keras.observe import stop_timeline as stop_timeline
from hvd_keras.ops.allreduce import allreduce as allreduce
from hvd_keras.ops.allreduce import grouped_allreduce as grouped_allreduce
from hvd_keras.ops.movement import allgather as allgather
from hvd_keras.ops.movement import alltoall as alltoall
from hvd_keras.ops.movement import broadcast as broadcast
from hvd_keras.ops.movement import grouped_allgather as grouped_allgather
from hvd_keras.ops.reducescatter import grouped_reducescatter as grouped_reducescatter
from hvd_keras.ops.reducescatter import reducescatter as reducescatter
from hvd_keras.ops.reduction import Compression as Compression
from hvd_keras.ops.reduction import Compressor as Compressor
from hvd_keras.ops.without_data import barrier as barrier
from hvd_keras.ops.without_data import local_rank_op as local_rank_op
from hvd_keras.ops.without_data import local_size_op as local_size_op
from hvd_keras.ops.without_data import process_set_included_op as process_set_included_op
from hvd_keras.ops.without_data import rank_op as rank_op
from hvd_keras.ops.without_data import size_op as size_op
from hvd_keras.optimizer import DistributedGradientTape as DistributedGradientTape
from hvd_keras.optimizer import DistributedOptimizer as DistributedOptimizer
from hvd_keras.optimizer import PartialDistributedGradientTape as PartialDistributedGradientTape
from hvd_keras.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
from hvd_keras.patches.keras_classes import SyncBatchNormalization as SyncBatchNormalization
from hvd_keras.runtime.gpu import ccl_built as ccl_built
from hvd_keras.runtime.gpu import cuda_built as cuda_built
from hvd_keras.runtime.gpu import ddl_built as ddl_built
from hvd_keras.runtime.gpu import gloo_built as gloo_built
from hvd_keras.runtime.gpu import gloo_enabled as gloo_enabled
from hvd_keras.runtime.gpu import mpi_built as mpi_built
from hvd_keras.runtime.gpu import mpi_enabled as mpi_enabled
from hvd_keras.runtime.gpu import mpi_threads_supported as mpi_threads_supported
from hvd_keras.runtime.gpu import nccl_built as nccl_built
from hvd_keras.runtime.gpu import rocm_built as rocm_built
from hvd_keras.runtime.objects import allgather_object as allgather_object
from hvd_keras.runtime.objects import broadcast_object as broadcast_object
from hvd_keras.runtime.objects import broadcast_object_fn as broadcast_object_fn
from hvd_keras.runtime.process_sets import ProcessSet as ProcessSet
from hvd_keras.runtime.process_sets import add_process_set as add_process_set
from hvd_keras.runtime.process_sets import global_process_set as global_process_set
from hvd_keras.runtime.process_sets import remove_process_set as remove_process_set
from hvd_keras.runtime.rank_info import cross_rank as cross_rank
from hvd_keras.runtime.rank_info import cross_size as cross_size
from hvd_keras.runtime.rank_info import is_homogeneous as is_homogeneous
from hvd_keras.runtime.rank_info import is_initialized as is_initialized
from hvd_keras.runtime.rank_info import linear_scaling as linear_scaling
from hvd_keras.runtime.rank_info import local_rank as local_rank
from hvd_keras.runtime.rank_info import local_size as local_size
from hvd_keras.runtime.rank_info import rank as rank
from hvd_keras.runtime.rank_info import size as size
from hvd_keras.runtime.rank_info import sqrt_scaling as sqrt_scaling
from hvd_keras.runtime.reductions import Adasum as Adasum
from hvd_keras.runtime.reductions import Average as Average
from hvd_keras.runtime.reductions import Max as Max
from hvd_keras.runtime.reductions import Min as Min
from hvd_keras.runtime.reductions import Product as Product
from hvd_keras.runtime.reductions import ReduceOp as ReduceOp
from hvd_keras.runtime.reductions import Sum as Sum
from hvd_keras.training.broadcasting import broadcast_variables as broadcast_variables
from hvd_keras.training.preprocessing import broadcast_preprocessing as broadcast_preprocessing

__version__: str

TENSORFLOW_VERSIONS: str

def no_tensorflow(python: str) -> str: ...
