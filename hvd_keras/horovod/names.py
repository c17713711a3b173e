"""Every public name of Horovod 0.28.1 for TensorFlow and Keras: where it is, and what differs.

The package ``horovod`` (``modules``) and the table of docs/migrating.md are built from this table.
"""

from dataclasses import dataclass

#: The version of Horovod that has these names.
VERSION = "0.28.1"

#: The text of the last column if it has the same differences as the column beside it.
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
        """Return the module of each name."""
        if self.home is None:
            return {}
        return {name.rpartition(".")[2]: self.home for name in self.names.split()}


_COLLECTIVES = "horovod.collectives"
_KERAS = "horovod.of_keras"
_SETS = "horovod.process_sets"
_TRAINING = "horovod.training"
_ELASTIC = "horovod.elastic"

#: By what they are about; in the order of the documentation.
TABLE: dict[str, tuple[Row, ...]] = {
    "the job": (
        Row(
            "init",
            note="ranks outside of `comm` get an error; a second call adds process sets; never "
            "raises `ImportError`",
            home="horovod.basics",
        ),
        Row(
            "shutdown is_initialized",
            note="`init` raises after a `shutdown` while others waited for this rank",
        ),
        Row("rank size local_rank local_size cross_rank cross_size"),
        Row(
            "is_homogeneous mpi_threads_supported mpi_enabled mpi_built nccl_built cuda_built "
            "rocm_built",
            note="NCCL, CUDA: found at run time; ROCm: always False",
        ),
        Row(
            "gloo_built gloo_enabled ddl_built ccl_built",
            note="always False",
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
            note="`mark_cycles` has no effect; see also `hvd.stats()`",
        ),
    ),
    "collectives": (
        Row("Average Sum Min Max Product", note="members of `hvd.ReduceOp`"),
        Row(
            "Adasum",
            note="any number of ranks and any optimizer; sparse gradients need "
            "`sparse_as_dense`; has no gradient",
        ),
        Row(
            "allreduce grouped_allreduce",
            note="groups may mix dtypes and slices; refuses averages and scale factors of integers",
            horovod="groups may mix dtypes and slices",
            home=_COLLECTIVES,
        ),
        Row(
            "allgather grouped_allgather broadcast",
            note="other [gradients](#gradients-through-collectives)",
            horovod="",
            home=_COLLECTIVES,
        ),
        Row(
            "reducescatter grouped_reducescatter",
            note="other [gradients](#gradients-through-collectives); refuses averages of integers",
            horovod="",
            home=_COLLECTIVES,
        ),
        Row("alltoall", home=_COLLECTIVES),
        Row("barrier", home=_COLLECTIVES),
        Row(
            "join",
            note="returns a tensor; other ranks may then call anything but `alltoall`, also with "
            "sparse gradients",
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
            note="an op in TensorFlow 1 graphs; warns without variables",
            home=_COLLECTIVES,
        ),
        Row(
            "broadcast_object broadcast_object_fn allgather_object",
            note="`session` is not needed",
            home=_COLLECTIVES,
        ),
        Row(
            "broadcast_global_variables BroadcastGlobalVariablesHook",
            note="TensorFlow 1; always an op (`horovod.keras` runs it immediately)",
            horovod="TensorFlow 1",
        ),
        Row(
            "ProcessSet add_process_set global_process_set",
            note="can be added at any time; ids are not reused; `size()` of a set not yet added is "
            "its number of ranks",
            horovod="can be added at any time",
            home=_SETS,
        ),
        Row(
            "remove_process_set",
            note="removing the global set is an error",
            horovod="",
            home=_SETS,
        ),
        Row("Compression", note="also `.bf16`; `Compressor` is public"),
        Row(
            "compression.NoneCompressor compression.FP16Compressor",
            "renamed",
            "`Compression.none`, `Compression.fp16`",
            horovod="",
            home=None,
        ),
        Row("Compressor", "same", "base class for your own compression"),
    ),
    "training": (
        Row(
            "SyncBatchNormalization",
            note="weighted by the ranks' counts, as `BatchNormalization(synchronized=True)`",
        ),
        Row(
            "DistributedOptimizer",
            note="no `use_locking`; modifies and returns its argument; `op=Sum` sums; raises on "
            "ranks outside of `process_set`",
            horovod="modifies and returns its argument; `op=Sum` sums",
            home=_TRAINING,
        ),
        Row("….register_local_var", home=None),
        Row(
            "DistributedGradientTape",
            note="names are always generic, without `use_generic_names`; raises on ranks outside "
            "of `process_set`",
            horovod="names are always generic",
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
        Row("PartialDistributedOptimizer", home=_KERAS),
        Row(
            "load_model",
            note="no `legacy_opts`; `custom_optimizers` only for your own classes",
            horovod="`legacy_opts` is not needed; `custom_optimizers` only for your own classes",
            home=_TRAINING,
        ),
    ),
    "horovod.keras and horovod.tensorflow.keras": (
        Row(
            "allreduce",
            "changed",
            "`allreduce(value, average=…, name=…)`; Horovod: `(value, name, average, …)`",
            horovod="",
            home=_KERAS,
        ),
        Row(
            "allgather broadcast",
            "changed",
            "the first argument is called `tensor`; Horovod: `value`",
            horovod="",
            home=_KERAS,
        ),
        Row(
            "reducescatter",
            "changed",
            "`reducescatter(value, op=…, name=…)`; Horovod: `(value, name, op)`",
            horovod="",
            home=_KERAS,
        ),
        Row(
            "broadcast_global_variables",
            "changed",
            "an op, to be run in a session; Horovod runs it immediately",
            horovod="",
            home=_KERAS,
        ),
        Row("DistributedOptimizer", home=_KERAS),
    ),
    "callbacks": (
        Row(
            "callbacks.BroadcastGlobalVariablesCallback",
            note="no `device`; runs before the first step of each "
            "`fit`, with the optimizer's state",
            horovod="runs before the first step of each `fit`, with the optimizer's state",
            home="horovod.callbacks",
        ),
        Row(
            "callbacks.MetricAverageCallback",
            note="no `device`; exact, also for AUC, Precision or unequal batch counts",
            horovod="exact, also for AUC, Precision or unequal batch counts",
            home="horovod.callbacks",
        ),
        Row(
            "callbacks.LearningRateWarmupCallback callbacks.LearningRateScheduleCallback",
            note="momentum correction scales the buffers, which also works in compiled steps",
            home="callbacks",
        ),
        Row(
            "callbacks.BestModelCheckpoint",
            "renamed",
            "`callbacks.ModelCheckpoint(path, monitor=…, save_best_only=True)`",
            horovod="set its `filepath`, as Spark estimators do, before `fit`",
            home="horovod.callbacks",
        ),
    ),
    "elastic": (
        Row(
            "elastic.run elastic.TensorFlowState elastic.TensorFlowKerasState elastic.KerasState "
            "elastic.ObjectState",
            "renamed",
            "`callbacks.Checkpoint` and `hvdrun --max-restarts`",
            horovod="[a new process](#elastic-training) continues from the last commit",
            home=_ELASTIC,
        ),
        Row(
            "elastic.CommitStateCallback elastic.UpdateBatchStateCallback "
            "elastic.UpdateEpochStateCallback",
            "renamed",
            "`callbacks.Checkpoint`",
            horovod="`state.batch` counts completed batches; `state.epoch` respects "
            "`initial_epoch`",
            home=_ELASTIC,
        ),
    ),
    "helpers": (
        Row(
            "horovod.common.elastic.*",
            "gone",
            "not needed",
            horovod="`State`, `ObjectState` and `run_fn`; the exceptions are never raised",
            home=None,
        ),
        Row(
            "horovod.data.* horovod.runner.launch horovod.runner.common.util.hosts "
            "horovod.runner.common.util.safe_shell_exec horovod.runner.common.util.settings "
            "horovod.runner.util.* horovod.tensorflow.gradient_aggregation*",
            "gone",
            "not needed",
            horovod="`ImportError` with what to use",
            home=None,
        ),
        Row(
            "horovod.common.util.* horovod.common.exceptions.*",
            "gone",
            "not needed",
            horovod="what programs import: `check_extension`, `gpu_available`, `nccl_built`, "
            "`is_version_greater_equal_than`, `split_list` and the like; the exceptions are never "
            "raised",
            home=None,
        ),
        Row(
            "mpi_ops._basics mpi_ops._allreduce util._executing_eagerly",
            "gone",
            "`allreduce(tensor, op=hvd.Sum)`, `tf.executing_eagerly`",
            horovod="kept, although private",
            home=None,
        ),
    ),
    "launching": (
        Row(
            "horovod.run",
            "changed",
            "`hvd.run(func, args, kwargs, np=…, hosts=…)`; other settings are options of "
            "`hvdrun`: `options=[…]`",
            horovod="arguments that `hvdrun` has no option for are refused",
            home="horovod.runner",
        ),
        Row(
            "horovod.spark.run",
            "renamed",
            "`hvd.spark.run`; for `HorovodRunner` of `sparkdl`, `hvd.spark.HorovodRunner`",
            horovod="arguments that `hvd.spark.run` does not have are refused",
            home="horovod.spark",
        ),
        Row(
            "horovod.ray.RayExecutor",
            "renamed",
            "`hvd_keras.ray.run`, or `hvd_keras.ray.TrainConfig` for Ray Train",
            horovod="each call starts new ranks; arguments that `hvd_keras.ray.run` does not have, "
            "and an `executable_cls`, are refused",
            home="horovod.ray",
        ),
        Row(
            "horovod.spark.keras.*",
            "gone",
            "write the rows with `hvd.spark.shard`, and train with `hvd.spark.run`",
            home=None,
        ),
        Row(
            "horovod.tensorflow.data.*",
            "gone",
            "`hvd.data.shard`",
            home=None,
        ),
    ),
}


def _homes(*sections: str) -> dict[str, str]:
    """Return the names of some sections; later sections take precedence."""
    return {k: v for section in sections for row in TABLE[section] for k, v in row.homes().items()}


_TENSORFLOW = _homes("the job", "collectives", "training")
_KERAS_MODULE = _homes(
    "the job", "collectives", "training", "horovod.keras and horovod.tensorflow.keras"
)
_ERRORS = "HorovodInternalError HostsUpdatedInterrupt"
_STATES = _homes("elastic") | dict.fromkeys(_ERRORS.split(), "horovod.common")
_CALLBACKS = _homes("callbacks") | {k: v for k, v in _STATES.items() if k.endswith("Callback")}
_RUN = {"run": "horovod.runner"}


def _of(home: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), home)


_COMMON = "horovod.common"
_REFERENCES = _of(_COMMON, "vars_to_refs refs_to_vars _executing_eagerly _cache _make_subgraph")
_OPS = (
    _of("horovod.basics", "_basics")
    | _of(_COLLECTIVES, "_allreduce")
    | _of(_COMMON, "handle_average_backwards_compatibility _executing_eagerly gpu_available")
)


#: By module of ``horovod``: the home of each name in it.
MODULES: dict[str, dict[str, str]] = {
    "horovod": _RUN,
    "horovod.runner": _RUN,
    "horovod.runner.common": {},
    "horovod.runner.common.util": {},
    "horovod.runner.common.util.env": _of(_COMMON, "get_env_rank_and_size"),
    "horovod.tensorflow": _TENSORFLOW
    | _OPS
    | _REFERENCES
    | _of(_COMMON, "check_extension split_list _LegacyOptimizer"),
    "horovod.tensorflow.mpi_ops": _TENSORFLOW | _OPS,
    "horovod.tensorflow.util": _REFERENCES | _of(_COMMON, "_has_eager"),
    "horovod.tensorflow.functions": _of(
        _COLLECTIVES, "allgather_object broadcast_object broadcast_object_fn broadcast_variables"
    ),
    "horovod.tensorflow.compression": _of("", "Compression Compressor")
    | _of(_COMMON, "NoneCompressor FP16Compressor"),
    "horovod.tensorflow.sync_batch_norm": _of("", "SyncBatchNormalization"),
    "horovod.tensorflow.elastic": _STATES,
    "horovod.tensorflow.keras": _KERAS_MODULE,
    "horovod.tensorflow.keras.elastic": _STATES,
    "horovod.tensorflow.keras.callbacks": _CALLBACKS,
    "horovod.keras": _KERAS_MODULE,
    "horovod.keras.callbacks": _CALLBACKS,
    "horovod.keras.elastic": _STATES,
    "horovod.spark": _of("horovod.spark", "run"),
    "horovod.ray": _of("horovod.ray", "RayExecutor"),
    "horovod.common": _homes("the job"),
    "horovod.common.basics": _of("horovod.basics", "HorovodBasics"),
    "horovod.common.util": _of("", "cuda_built rocm_built mpi_enabled gloo_enabled")
    | _of(_COMMON, "mpi_built gloo_built nccl_built ddl_built ccl_built _cache")
    | _of(_COMMON, "check_extension extension_available gpu_available num_rank_is_power_2")
    | _of(_COMMON, "split_list is_version_greater_equal_than"),
    "horovod.common.elastic": _of(_ELASTIC, "State ObjectState run_fn") | _of(_COMMON, _ERRORS),
    "horovod.common.exceptions": _of(_COMMON, f"{_ERRORS} HorovodVersionMismatchError"),
    "horovod.common.process_sets": _of(
        _SETS, "ProcessSet add_process_set global_process_set remove_process_set"
    ),
}

#: Modules that raise ImportError, with the reason.
ABSENT = {
    "horovod.torch": "hvd_keras trains TensorFlow and Keras models. For PyTorch use "
    "torch.nn.parallel.DistributedDataParallel.",
    "horovod.mxnet": "hvd_keras trains TensorFlow and Keras models.",
    "horovod.data": "hvd_keras has no data loaders. tf.data's prefetch reads ahead.",
    "horovod.runner.launch": "start the program with hvdrun, or call horovod.run.",
    "horovod.runner.common.util.hosts": "hvdrun's hosts are options of its command line.",
    "horovod.runner.common.util.safe_shell_exec": "Python's subprocess runs commands.",
    "horovod.runner.common.util.settings": "hvdrun's settings are options of its command line.",
    "horovod.runner.util": "Python's threading and subprocess have what is in it.",
    "horovod.tensorflow.gradient_aggregation": "hvd.DistributedOptimizer has "
    "backward_passes_per_step.",
    "horovod.tensorflow.gradient_aggregation_eager": "hvd.DistributedOptimizer has "
    "backward_passes_per_step.",
    "horovod.tensorflow.data": "hvd_keras has no service for tf.data. hvd_keras.data.shard gives "
    "each rank its part of a dataset.",
    "horovod.spark.keras": "hvd_keras has no Spark estimators. Write the rows with "
    "hvd.spark.shard, and train with hvd.spark.run.",
}
