"""Every public name of Horovod 0.28.1 for TensorFlow and Keras: where it is, and what differs.

The package ``horovod`` and the table of docs/migrating.md are built from this table.
"""

import re
from dataclasses import dataclass

#: The version of Horovod that has these names.
VERSION = "0.28.1"

#: The text of the last column if it has the same differences as the column beside it.
LIKEWISE = "="


@dataclass(frozen=True)
class Row:
    """Names that have the same remarks."""

    names: str  # separated by spaces; a part before a dot is for the reader alone
    state: str = "same"  # under ``import hvd_keras``; or renamed, changed, gone
    note: str = ""  # what differs from Horovod there
    horovod: str = LIKEWISE  # what differs from Horovod under ``import horovod``
    # The module of hvd_keras that has the names for ``horovod``; empty: what is public in
    # hvd_keras; None: there are none.
    home: str | None = ""

    def homes(self) -> dict[str, str]:
        """Return the module of each name."""
        if self.home is None:
            return {}
        return {name.rpartition(".")[2]: self.home for name in self.names.split()}


# A line has names, two spaces, their state unless that is "same", and "@" with their home: a module
# of this folder, or hvd_keras's /callbacks; "@-" for None. Below it are Row.note and, after "|",
# Row.horovod.
_TEXT = """
# the job
init  @basics
    ranks outside of `comm` get an error; a second call adds process sets
shutdown is_initialized
    `init` raises after a `shutdown` while others waited for this rank
rank size local_rank local_size cross_rank cross_size
is_homogeneous mpi_threads_supported mpi_enabled mpi_built nccl_built cuda_built rocm_built
gloo_built gloo_enabled ddl_built ccl_built
sycl_built  gone @basics
    Intel's GPUs are not supported | always False
gpu_available  gone @basics
    `tf.config.list_physical_devices('GPU')` |
rank_op local_rank_op local_size_op
size_op process_set_included_op  @basics
start_timeline stop_timeline
# collectives
Average Sum Min Max Product
Adasum
    any number of ranks; sparse gradients need `sparse_as_dense`; has no gradient
allreduce grouped_allreduce  @collectives
    groups may mix dtypes and slices
allgather grouped_allgather broadcast  @collectives
reducescatter grouped_reducescatter  @collectives
alltoall  @collectives
barrier  @collectives
join
    returns a tensor; other ranks may then call anything but `alltoall`
broadcast_  gone @collectives
    `broadcast_variables` |
broadcast_variables  @collectives
    an op in TensorFlow 1 graphs; warns without variables
broadcast_object broadcast_object_fn allgather_object  @collectives
broadcast_global_variables BroadcastGlobalVariablesHook
    TensorFlow 1; always an op | TensorFlow 1
ProcessSet add_process_set global_process_set  @basics
    can be added at any time
remove_process_set  @basics
Compression Compressor
compression.NoneCompressor compression.FP16Compressor  renamed @-
    `Compression.none`, `Compression.fp16` |
# training
SyncBatchNormalization
DistributedOptimizer  @training:optimizer_of_tensorflow
    no `use_locking`; modifies and returns its argument; `op=Sum` sums; raises on ranks outside
    of `process_set` | =, with `use_locking`
….register_local_var  @-
DistributedGradientTape  @training
    no `use_generic_names`; raises on ranks outside of `process_set` | names are always generic
….register_local_source  @-
….get_local_and_global_gradients  gone @-
    `gradient` returns both in the order of the sources |
PartialDistributedGradientTape  @training
PartialDistributedOptimizer  @training
load_model  @training
    no `legacy_opts`; `custom_optimizers` only for your own classes | =, with `legacy_opts`
# horovod.keras and horovod.tensorflow.keras
allreduce  changed @training
    `allreduce(value, average=…, name=…)`; Horovod: `(value, name, average, …)` |
allgather broadcast  changed @training
    the first argument is called `tensor`; Horovod: `value` |
reducescatter  changed @training
    `reducescatter(value, op=…, name=…)`; Horovod: `(value, name, op)` |
broadcast_global_variables  changed @training
    an op, to be run in a session; Horovod runs it immediately |
DistributedOptimizer  @training
# callbacks
callbacks.BroadcastGlobalVariablesCallback  @training
    no `device`; with the optimizer's state | =, with `device`
callbacks.MetricAverageCallback  @training
    no `device`; exact, also for AUC | =, with `device`
callbacks.LearningRateWarmupCallback  @/callbacks
callbacks.LearningRateScheduleCallback  @training
    a number as `multiplier` holds | decays: `multiplier ** (epoch - start_epoch)`
callbacks.BestModelCheckpoint  renamed @training
    `callbacks.ModelCheckpoint(path, monitor=…, save_best_only=True)` | set its `filepath`
# elastic
elastic.run elastic.TensorFlowState elastic.TensorFlowKerasState elastic.KerasState \
elastic.ObjectState  renamed @elastic
    `callbacks.Checkpoint` and `hvdrun --max-restarts` | [a new process](#elastic-training)
    continues from the last commit
elastic.CommitStateCallback elastic.UpdateBatchStateCallback elastic.UpdateEpochStateCallback  \
renamed @elastic
    `callbacks.Checkpoint` | `state.batch` counts completed batches; `state.epoch` respects
    `initial_epoch`
# helpers
horovod.common.elastic.*  gone @-
horovod.data.* horovod.runner.launch horovod.runner.common.util.hosts \
horovod.runner.common.util.safe_shell_exec horovod.runner.common.util.settings \
horovod.runner.util.* horovod.tensorflow.gradient_aggregation*  gone @-
horovod.common.util.* horovod.common.exceptions.*  gone @-
mpi_ops._basics mpi_ops._allreduce util._executing_eagerly  gone @-
# launching
horovod.run  changed @launching
    `hvd.run(func, args, kwargs, np=…, hosts=…, options=[…])` | refuses arguments that are no
    options of `hvdrun`
horovod.spark.run  renamed @launching:spark_run
    `hvd.spark.run`; for `HorovodRunner` of `sparkdl`, `hvd.spark.HorovodRunner` | refuses
    arguments that this lacks
horovod.ray.RayExecutor  renamed @launching
    `hvd.ray.run`, or `hvd.ray.TrainConfig` for Ray Train | [limits](platforms/ray.md#limits)
horovod.spark.keras.*  gone @-
horovod.tensorflow.data.*  gone @-
"""


def _row(block: str) -> Row:
    head, *lines = block.split("\n")
    names, _, rest = head.partition("  ")
    state, _, home = rest.partition("@")
    known = {"": "", "-": None, "/callbacks": "callbacks"}
    note, bar, other = (part.strip() for part in " ".join(lines).partition("|"))
    return Row(
        names,
        state.strip() or "same",
        " ".join(note.split()),
        " ".join(other.split()) if bar else LIKEWISE,
        known.get(home, f"horovod.{home}"),
    )


#: By what they are about; in the order of the documentation.
TABLE: dict[str, tuple[Row, ...]] = {
    title: tuple(map(_row, re.split(r"\n(?=\S)", rows)))
    for title, rows in re.findall(r"# (.*)\n((?:[^#].*\n)+)", _TEXT)
}

_COLLECTIVES, _BASICS = "horovod.collectives", "horovod.basics"
_ELASTIC, _LAUNCHING = "horovod.elastic", "horovod.launching"


def _homes(*sections: str) -> dict[str, str]:
    """Return the names of some sections; later sections take precedence."""
    return {k: v for section in sections for row in TABLE[section] for k, v in row.homes().items()}


_TENSORFLOW = _homes("the job", "collectives", "training")
_KERAS_MODULE = _homes(
    "the job", "collectives", "training", "horovod.keras and horovod.tensorflow.keras"
)
_ERRORS = "HorovodInternalError HostsUpdatedInterrupt"
_STATES = _homes("elastic") | dict.fromkeys(_ERRORS.split(), _BASICS)
_CALLBACKS = _homes("callbacks") | {k: v for k, v in _STATES.items() if k.endswith("Callback")}
_RUN = {"run": _LAUNCHING}


def _of(home: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), home)


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
    "horovod.common": _homes("the job"),
    "horovod.common.basics": _of(_BASICS, "HorovodBasics"),
    "horovod.common.util": _of("", "cuda_built rocm_built mpi_enabled gloo_enabled")
    | _of(_BASICS, "mpi_built gloo_built nccl_built ddl_built ccl_built _cache")
    | _of(_BASICS, "check_extension extension_available gpu_available num_rank_is_power_2")
    | _of(_BASICS, "split_list is_version_greater_equal_than"),
    "horovod.common.elastic": _of(_ELASTIC, "State ObjectState run_fn") | _of(_BASICS, _ERRORS),
    "horovod.common.exceptions": _of(_BASICS, f"{_ERRORS} HorovodVersionMismatchError"),
    "horovod.common.process_sets": _of(
        _BASICS, "ProcessSet add_process_set global_process_set remove_process_set"
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
