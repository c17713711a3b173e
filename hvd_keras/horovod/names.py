"""Every public name of Horovod 0.28.1 for TensorFlow and Keras, and where it is.

The package ``horovod`` is built from this table. docs/migrating.md says what differs.
"""

#: The version of Horovod that has these names.
VERSION = "0.28.1"

_BASICS, _COLLECTIVES, _TRAINING = "horovod.basics", "horovod.collectives", "horovod.training"
_ELASTIC, _LAUNCHING = "horovod.elastic", "horovod.launching"


def _of(home: str, names: str) -> dict[str, str]:
    """Return the home of each name: a module of hvd_keras; "" is what is public in hvd_keras."""
    return dict.fromkeys(names.split(), home)


_JOB = _of(_BASICS, "init sycl_built gpu_available size_op process_set_included_op") | _of(
    "",
    "shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous "
    "mpi_threads_supported mpi_enabled mpi_built nccl_built cuda_built rocm_built gloo_built "
    "gloo_enabled ddl_built ccl_built rank_op local_rank_op local_size_op start_timeline "
    "stop_timeline",
)
_SETS = _of(_BASICS, "ProcessSet add_process_set global_process_set remove_process_set")
_TENSORFLOW = (
    _JOB
    | _of("", "Average Sum Min Max Product Adasum join SyncBatchNormalization")
    | _of("", "broadcast_global_variables BroadcastGlobalVariablesHook Compression Compressor")
    | _of(
        _COLLECTIVES,
        "allreduce grouped_allreduce allgather grouped_allgather broadcast reducescatter "
        "grouped_reducescatter alltoall barrier broadcast_ broadcast_variables broadcast_object "
        "broadcast_object_fn allgather_object",
    )
    | _SETS
    | _of(f"{_TRAINING}:optimizer_of_tensorflow", "DistributedOptimizer")
    | _of(_TRAINING, "DistributedGradientTape PartialDistributedGradientTape")
    | _of(_TRAINING, "PartialDistributedOptimizer load_model")
)
_KERAS_MODULE = _TENSORFLOW | _of(
    _TRAINING,
    "allreduce allgather broadcast reducescatter broadcast_global_variables DistributedOptimizer",
)
_STATE_CALLBACKS = _of(
    _ELASTIC, "CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback"
)
_CALLBACKS = (
    _of(_TRAINING, "BroadcastGlobalVariablesCallback MetricAverageCallback BestModelCheckpoint")
    | _of(_TRAINING, "LearningRateScheduleCallback")
    | _of("callbacks", "LearningRateWarmupCallback")
    | _STATE_CALLBACKS
)
_ERRORS = "HorovodInternalError HostsUpdatedInterrupt"
_STATES = (
    _of(_ELASTIC, "run TensorFlowState TensorFlowKerasState KerasState ObjectState")
    | _STATE_CALLBACKS
    | _of(_BASICS, _ERRORS)
)
_RUN = _of(_LAUNCHING, "run")
_REFERENCES = _of(_BASICS, "vars_to_refs refs_to_vars _executing_eagerly _cache _make_subgraph")
_OPS = (
    _of(_BASICS, "_basics")
    | _of(_COLLECTIVES, "_allreduce")
    | _of(_BASICS, "handle_average_backwards_compatibility _executing_eagerly gpu_available")
)


#: By module of ``horovod``: the home of each name in it.
MODULES: dict[str, dict[str, str]] = {
    "horovod": _RUN,
    "horovod.runner": _RUN,
    "horovod.runner.common": {},
    "horovod.runner.common.util": {},
    "horovod.runner.common.util.env": _of(_BASICS, "get_env_rank_and_size"),
    "horovod.tensorflow": _TENSORFLOW
    | _OPS
    | _REFERENCES
    | _of(_BASICS, "check_extension split_list _LegacyOptimizer"),
    "horovod.tensorflow.mpi_ops": _TENSORFLOW | _OPS,
    "horovod.tensorflow.util": _REFERENCES | _of(_BASICS, "_has_eager"),
    "horovod.tensorflow.functions": _of(
        _COLLECTIVES, "allgather_object broadcast_object broadcast_object_fn broadcast_variables"
    ),
    "horovod.tensorflow.compression": _of("", "Compression Compressor")
    | _of(_BASICS, "NoneCompressor FP16Compressor"),
    "horovod.tensorflow.sync_batch_norm": _of("", "SyncBatchNormalization"),
    "horovod.tensorflow.elastic": _STATES,
    "horovod.tensorflow.keras": _KERAS_MODULE,
    "horovod.tensorflow.keras.elastic": _STATES,
    "horovod.tensorflow.keras.callbacks": _CALLBACKS,
    "horovod.keras": _KERAS_MODULE,
    "horovod.keras.callbacks": _CALLBACKS,
    "horovod.keras.elastic": _STATES,
    "horovod.spark": _of(f"{_LAUNCHING}:spark_run", "run"),
    "horovod.ray": _of(_LAUNCHING, "RayExecutor"),
    "horovod.common": _JOB,
    "horovod.common.basics": _of(_BASICS, "HorovodBasics"),
    "horovod.common.util": _of("", "cuda_built rocm_built mpi_enabled gloo_enabled")
    | _of(_BASICS, "mpi_built gloo_built nccl_built ddl_built ccl_built _cache")
    | _of(_BASICS, "check_extension extension_available gpu_available num_rank_is_power_2")
    | _of(_BASICS, "split_list is_version_greater_equal_than"),
    "horovod.common.elastic": _of(_ELASTIC, "State ObjectState run_fn") | _of(_BASICS, _ERRORS),
    "horovod.common.exceptions": _of(_BASICS, f"{_ERRORS} HorovodVersionMismatchError"),
    "horovod.common.process_sets": _SETS,
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
    **dict.fromkeys(
        (
            "horovod.tensorflow.gradient_aggregation",
            "horovod.tensorflow.gradient_aggregation_eager",
        ),
        "hvd.DistributedOptimizer has backward_passes_per_step.",
    ),
    "horovod.tensorflow.data": "hvd_keras has no service for tf.data. hvd_keras.data.shard gives "
    "each rank its part of a dataset.",
    "horovod.spark.keras": "hvd_keras has no Spark estimators. Write the rows with "
    "hvd.spark.shard, and train with hvd.spark.run.",
}
