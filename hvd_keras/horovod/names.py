"""Every public name of Horovod 0.28.1 for TensorFlow and Keras: where it lives, and what differs.

The package ``horovod`` is built from this table (``modules``), and so is that of docs/migrating.md.
"""

from dataclasses import dataclass

#: Horovod's version whose names these are.
VERSION = "0.28.1"

#: What the last column says where nothing differs from what stands beside it.
LIKEWISE = "the same"


@dataclass(frozen=True)
class Row:
    """Names that have the same remarks.

    Attributes:
        names: separated by spaces; a part before a dot is for the reader alone.
        state: under ``import hvd_keras``: same, renamed, changed or gone.
        note: what differs from Horovod there.
        horovod: what differs from Horovod under ``import horovod``.
        home: the module of hvd_keras that has the names for ``horovod``; empty: what is public in
            hvd_keras; None: there are none.
    """

    names: str
    state: str = "same"
    note: str = ""
    horovod: str = LIKEWISE
    home: str | None = ""

    def homes(self) -> dict[str, str]:
        """The module of each name."""
        if self.home is None:
            return {}
        return {name.rpartition(".")[2]: self.home for name in self.names.split()}


_COLLECTIVES = "horovod.collectives"
_KERAS = "horovod.keras_collectives"
_SETS = "horovod.process_sets"
_TRAINING = "horovod.training"
_ELASTIC = "horovod.elastic"

#: By what they are about; in the order of the documentation.
TABLE: dict[str, tuple[Row, ...]] = {
    "the job": (
        Row(
            "init",
            note="processes that `comm` does not list get an error; a second call adds process "
            "sets; never raises `ImportError`",
            home="horovod.lifecycle",
        ),
        Row(
            "shutdown is_initialized",
            note="after a `shutdown` while others waited for this rank, `init` raises",
        ),
        Row("rank size local_rank local_size cross_rank cross_size"),
        Row(
            "is_homogeneous mpi_threads_supported mpi_enabled mpi_built nccl_built cuda_built "
            "rocm_built",
            note="`nccl_built`, `cuda_built`: what was found when asked, not when built; ROCm: no",
        ),
        Row(
            "gloo_built gloo_enabled ddl_built ccl_built",
            note="always False: MPI and shared memory are in their place",
        ),
        Row(
            "sycl_built",
            "gone",
            "Intel's GPUs are not supported",
            horovod="always False",
            home="horovod.common",
        ),
        Row(
            "gpu_available",
            "gone",
            "`tf.config.list_physical_devices('GPU')`",
            horovod="",
            home="horovod.common",
        ),
        Row("rank_op local_rank_op local_size_op"),
        Row("size_op process_set_included_op", home=_SETS),
        Row(
            "start_timeline stop_timeline",
            note="there are no cycles to mark; also `hvd.stats()`",
        ),
    ),
    "collectives": (
        Row("Average Sum Min Max Product", note="members of `hvd.ReduceOp`"),
        Row(
            "Adasum",
            note="for any number of ranks, and any optimizer (with `sparse_as_dense` where "
            "gradients are sparse); has no gradient",
        ),
        Row(
            "allreduce grouped_allreduce",
            note="a group may mix dtypes and slices; averages and scale factors of integers are "
            "refused",
            horovod="a group may mix dtypes and slices",
            home=_COLLECTIVES,
        ),
        Row(
            "allgather grouped_allgather broadcast",
            note="[gradients](#gradients-through-collectives) through them have another scale",
            horovod="",
            home=_COLLECTIVES,
        ),
        Row(
            "reducescatter grouped_reducescatter",
            note="[gradients](#gradients-through-collectives) through them have another scale; "
            "averages of integers are refused",
            horovod="",
            home=_COLLECTIVES,
        ),
        Row("alltoall", home=_COLLECTIVES),
        Row("barrier"),
        Row(
            "join",
            note="a tensor, as there; other ranks may call anything but `alltoall` meanwhile, also "
            "with sparse gradients",
        ),
        Row(
            "broadcast_",
            "gone",
            "`broadcast_variables`",
            horovod="",
            home=_COLLECTIVES,
        ),
        Row(
            "broadcast_variables",
            note="an op in TensorFlow 1 graphs; warns if there are no variables",
        ),
        Row(
            "broadcast_object broadcast_object_fn allgather_object",
            note="`session` is not needed",
        ),
        Row(
            "broadcast_global_variables BroadcastGlobalVariablesHook",
            note="TensorFlow 1; an op, also where `horovod.keras` runs it at once",
            horovod="TensorFlow 1",
        ),
        Row(
            "ProcessSet add_process_set global_process_set",
            note="may be added at any time; numbers are not used again; `size()` of a set that was "
            "not added is its number of ranks",
            horovod="may be added at any time",
            home=_SETS,
        ),
        Row(
            "remove_process_set",
            note="that of all ranks is an error",
            horovod="",
            home=_SETS,
        ),
        Row("Compression", note="and `.bf16`; `Compressor` is public"),
        Row("Compressor", "same", "derive your own compression from it"),
    ),
    "training": (
        Row(
            "SyncBatchNormalization",
            note="weighted by the ranks' counts; `BatchNormalization(synchronized=True)` does the "
            "same",
        ),
        Row(
            "DistributedOptimizer",
            note="without `use_locking`; changes and returns the optimizer that it gets; `op=Sum` "
            "sums; a rank outside of `process_set` gets an error",
            horovod="changes and returns the optimizer that it gets; `op=Sum` sums",
            home=_TRAINING,
        ),
        Row("….register_local_var", home=None),
        Row(
            "DistributedGradientTape",
            note="`.gradient` without `use_generic_names`, for names are generic always; a rank "
            "outside of `process_set` gets an error",
            horovod="names are generic always",
            home=_TRAINING,
        ),
        Row("….register_local_source", home=None),
        Row(
            "….get_local_and_global_gradients",
            "gone",
            "`gradient` returns both in the order of the sources",
            horovod="",
            home=None,
        ),
        Row("PartialDistributedGradientTape", home=_TRAINING),
        Row("PartialDistributedOptimizer", home="horovod.keras_training"),
        Row(
            "load_model",
            note="without `legacy_opts`; `custom_optimizers` for classes of your own only",
            horovod="`legacy_opts` is not needed; `custom_optimizers` for classes of your own only",
            home=_TRAINING,
        ),
    ),
    "horovod.keras and horovod.tensorflow.keras": (
        Row(
            "allreduce",
            "changed",
            "`allreduce(value, average=…, name=…)`; there `(value, name, average, …)`",
            horovod="",
            home=_KERAS,
        ),
        Row(
            "allgather broadcast",
            "changed",
            "the first argument is called `tensor`; there `value`",
            horovod="",
            home=_KERAS,
        ),
        Row(
            "reducescatter",
            "changed",
            "`reducescatter(value, op=…, name=…)`; there `(value, name, op)`",
            horovod="",
            home=_KERAS,
        ),
        Row(
            "broadcast_global_variables",
            "changed",
            "an op, to be run in a session; there it runs at once",
            horovod="",
            home=_KERAS,
        ),
        Row("DistributedOptimizer", home="horovod.keras_training"),
    ),
    "callbacks": (
        Row(
            "callbacks.BroadcastGlobalVariablesCallback",
            note="without `device`; `local_variables` is not needed: variables registered as local "
            "are left out; before the first step of each `fit`, with the optimizer's state",
            horovod="before the first step of each `fit`, with the optimizer's state",
            home="horovod.callbacks",
        ),
        Row(
            "callbacks.MetricAverageCallback",
            note="without `device`; exact: the metrics' states are summed, also for AUC, Precision "
            "or unequal batch counts",
            horovod="exact: the metrics' states are summed, also for AUC, Precision or unequal "
            "batch counts",
            home="horovod.callbacks",
        ),
        Row(
            "callbacks.LearningRateWarmupCallback callbacks.LearningRateScheduleCallback",
            note="momentum correction scales the momentum buffers, which has the same effect and "
            "works in compiled steps",
            home="callbacks",
        ),
        Row(
            "callbacks.BestModelCheckpoint",
            "renamed",
            "`callbacks.ModelCheckpoint(path, monitor=…, save_best_only=True)`",
            home=None,
        ),
    ),
    "elastic": (
        Row(
            "elastic.run elastic.TensorFlowState elastic.TensorFlowKerasState elastic.KerasState "
            "elastic.ObjectState",
            "renamed",
            "`callbacks.Checkpoint` and `hvdrun --max-restarts`",
            horovod="[a new process](#elastic-training) goes on from the last commit",
            home=_ELASTIC,
        ),
        Row(
            "elastic.CommitStateCallback elastic.UpdateBatchStateCallback "
            "elastic.UpdateEpochStateCallback",
            "renamed",
            "`callbacks.Checkpoint`",
            horovod="`state.batch` counts the batches that are done; `state.epoch` is right with "
            "`initial_epoch`, too",
            home=_ELASTIC,
        ),
    ),
    "launching": (
        Row(
            "horovod.run",
            "changed",
            "`hvd.run(func, args, kwargs, np=…, hosts=…)`; other arguments are options of "
            "`hvdrun`, in `options=[…]`",
            horovod="arguments that `hvdrun` has no option for are refused",
            home="horovod.runner",
        ),
        Row(
            "horovod.spark.* horovod.ray.* horovod.tensorflow.data.*",
            "gone",
            "`mpirun` and `srun` start the same script",
            home=None,
        ),
    ),
}


def _homes(*sections: str) -> dict[str, str]:
    """The names of some sections; a later one goes before an earlier one."""
    return {k: v for section in sections for row in TABLE[section] for k, v in row.homes().items()}


_TENSORFLOW = _homes("the job", "collectives", "training")
_KERAS_MODULE = _homes(
    "the job", "collectives", "training", "horovod.keras and horovod.tensorflow.keras"
)
_STATES = _homes("elastic")
_CALLBACKS = _homes("callbacks") | {k: v for k, v in _STATES.items() if k.endswith("Callback")}
_RUN = {"run": "horovod.runner"}
_BUILT = (
    "mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built "
    "mpi_enabled gloo_enabled mpi_threads_supported"
)


def _of(home: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), home)


#: By module of ``horovod``: the home of each name in it.
MODULES: dict[str, dict[str, str]] = {
    "horovod": _RUN,
    "horovod.runner": _RUN,
    "horovod.tensorflow": _TENSORFLOW,
    "horovod.tensorflow.mpi_ops": _TENSORFLOW,
    "horovod.tensorflow.functions": _of(
        "", "allgather_object broadcast_object broadcast_object_fn broadcast_variables"
    ),
    "horovod.tensorflow.compression": _of("", "Compression Compressor"),
    "horovod.tensorflow.sync_batch_norm": _of("", "SyncBatchNormalization"),
    "horovod.tensorflow.elastic": _STATES,
    "horovod.tensorflow.keras": _KERAS_MODULE,
    "horovod.tensorflow.keras.elastic": _STATES,
    "horovod.tensorflow.keras.callbacks": _CALLBACKS,
    "horovod.keras": _KERAS_MODULE,
    "horovod.keras.callbacks": _CALLBACKS,
    "horovod.keras.elastic": _STATES,
    "horovod.common": _homes("the job"),
    "horovod.common.util": _of("", _BUILT)
    | _of(
        "horovod.common",
        "check_extension extension_available gpu_available num_rank_is_power_2 split_list",
    ),
    "horovod.common.exceptions": _of(
        "horovod.common", "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError"
    ),
    "horovod.common.process_sets": _of(
        _SETS, "ProcessSet add_process_set global_process_set remove_process_set"
    ),
}

#: Modules that raise ImportError, with the reason.
ABSENT = {
    "horovod.torch": "hvd_keras trains TensorFlow and Keras models. For PyTorch use "
    "torch.nn.parallel.DistributedDataParallel.",
    "horovod.mxnet": "hvd_keras trains TensorFlow and Keras models.",
    "horovod.spark": "hvd_keras has no Spark estimators. Start the script with hvdrun, mpirun or "
    "srun.",
    "horovod.ray": "hvd_keras has no Ray executor. Start the script with hvdrun, mpirun or srun.",
}
