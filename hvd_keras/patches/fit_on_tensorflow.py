"""``training.fit_state.Backend`` on TensorFlow."""

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras.data.tensorflow import datasets, sharding
from hvd_keras.data.tensorflow.sharding import passes_of as passes_of
from hvd_keras.data.tensorflow.sharding import repeated as repeated
from hvd_keras.data.tensorflow.sharding import repeats as repeats
from hvd_keras.gradients import agreement, model_ranks, values
from hvd_keras.patches import keras_classes, patched_fit
from hvd_keras.patches.losses import validate_together as validate_together
from hvd_keras.patches.losses import weighed as weighed
from hvd_keras.runtime import libraries, log, rank_info
from hvd_keras.runtime.keras import is_legacy, keras, require
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.training import broadcasting, step_trials, variables
from hvd_keras.training.fit_state import Fit


def rows_in_steps(dataset: Any) -> Any:
    """Describe how many rows each step has, or return None."""
    if (own := sharding.batch_of(dataset)) is not None:
        return own
    spec = tf.nest.flatten(getattr(dataset, "element_spec", ()))
    shape = spec[0].shape if spec and isinstance(spec[0], tf.TensorSpec) else None
    if shape is not None and shape.rank and shape[0] is not None:
        return shape[0]
    return datasets.batches_of(dataset) if isinstance(dataset, tf.data.Dataset) else None


def _rows_of_batches(own: Fit, dataset: Any) -> int | None:
    rows: Any = rows_in_steps(dataset)
    x = tf.nest.flatten(own.arguments["x"])
    if rows is None and all(map(values.is_array, x)):
        return min(own.arguments["batch_size"] or 32, int(x[0].shape[0]))  # Keras's default
    return int(rows[1] if isinstance(rows, list) else rows) if rows else None


def check(model: Any) -> None:
    """Raise ValueError if a ``tf.distribute.Strategy`` distributes the model, too.

    If XLA cannot compile the collectives, warn, and turn the model's ``jit_compile`` off.
    """
    with model.distribute_strategy.scope():  # in which the model was made
        agreement.refuse_strategies()
    if getattr(model, "jit_compile", False) and (problem := libraries.why_no_xla()):
        model.jit_compile = False
        if rank_info.local_rank() == 0:
            log.warn_once(f"models train without XLA (jit_compile=False): {problem}")


def synchronize(model: Any, process_set: ProcessSet) -> None:
    """Let batch normalisation have the statistics of the ranks that train a model."""
    keras_classes.synchronize_on(model._flatten_layers(), process_set)


def prepare(own: Fit, dataset: Any) -> None:
    """Create the variables of a model, and find the passes over its data."""
    passes = passes_of(dataset)
    steps = own.arguments.get("steps_per_epoch")
    # Keras begins the data anew in each epoch, or when they end.
    goes_on = bool(passes) and steps is not None and steps != int(dataset.cardinality())
    own.seekable = sharding.seekable(dataset) if passes and not goes_on else None
    is_endless = passes and dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    own.begins_anew = goes_on and not (is_endless and repeated(dataset))
    own.passes = () if own.begins_anew else passes
    for one in passes:
        one.goes_on = goes_on and not own.begins_anew
    model, process_set = own.model, own.process_set
    if process_set.size() > 1:
        own.source = _source_rows(dataset)
        sharded = filter(passes_of, (dataset, own.arguments["validation_data"]))
        own.caches = [file for one in sharded for file in datasets.cache_files(one)]
    averaging = model_ranks.step_set_of(model) or process_set
    # Before callbacks broadcast or restore, and before the ranks compare what they train.
    every = model_ranks.optimizers_of(model, within=True)
    others = [o for o in every if o is not model.optimizer]
    is_built = variables.is_built(model) and all(getattr(o, "built", True) for o in others)
    if isinstance(dataset, tf.data.Dataset) and not is_built:
        own.problem = broadcasting.build(model, dataset.element_spec)
    several = averaging.size() > 1
    if several and can_look_at(dataset) and model_ranks.averages_rows_of(model):
        own.rows = _rows_of_batches(own, dataset)
        trial = step_trials.tried(model, dataset.element_spec, averaging.size())
        own.mixes, own.constants = trial.what_mixes(model), trial.constants
    if process_set.size() > 1 and not is_legacy:
        keras_classes.read_by_rows(model, model._flatten_layers())


def build_step(own: Fit) -> None:
    """Create the variables that Keras's own step makes, so that it is traced once."""
    if isinstance(own.dataset, tf.data.Dataset) and not is_legacy:
        broadcasting.build_step(own.model, own.dataset.element_spec)


def build_metrics(own: Fit) -> None:
    """Create the variables of metrics, as the first step would."""
    if isinstance(own.dataset, tf.data.Dataset):
        broadcasting.build(own.model, own.dataset.element_spec, whole_step=True)


def weigh_classes(arguments: dict[str, Any]) -> None:
    """Let ``class_weight`` of ``fit`` multiply the weights of ``uneven="pad"``.

    Keras 3 refuses it with any weights, and should where the data have their own.
    """
    unpack = keras.utils.unpack_x_y_sample_weight
    dataset: Any = arguments.get("x")
    pads = any(
        one.source.split.uneven == "pad" and unpack(one.source.spec)[2] is None
        for one in passes_of(dataset)
    )
    if pads and not is_legacy and unpack(dataset.element_spec)[2] is not None:
        arguments["x"] = sharding.weigh_classes(dataset, arguments.pop("class_weight"))


def logs_by_steps(model: Any) -> bool:
    """Whether Keras logs losses of outputs in a graph, which has batches of any size."""
    return not (model.run_eagerly or tf.config.functions_run_eagerly())


def can_look_at(dataset: Any) -> bool:
    """Whether ``pass_first_batch`` can pass the batches of a dataset."""
    spec = tf.nest.flatten(getattr(dataset, "element_spec", ()))
    is_dense = all(isinstance(part, tf.TensorSpec) for part in spec)
    return isinstance(dataset, tf.data.Dataset) and is_dense


def _source_rows(dataset: Any) -> Any:
    found = datasets.source_of(dataset) if isinstance(dataset, tf.data.Dataset) else None
    hashes = values.row_hashes(found[0]) if found else None
    return [*hashes, zlib.crc32(found[1].encode())] if found and hashes else None


def gpu_bytes() -> int | None:
    """Return how much memory of its GPU this process uses; None without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    return int(tf.config.experimental.get_memory_info("GPU:0")["current"])


def build(
    of_keras: Callable[..., None], model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Replace ``keras.Model._maybe_symbolic_build``, which fit calls before the callbacks begin."""
    if iterator is not None:
        require(iterator, "_distributed_dataset", "to make variables before the first step")
        require(iterator, "num_batches", "to compare the numbers of steps")
        # evaluate calls this, too, perhaps in a fit, whose data it must not get.
        dataset = iterator._distributed_dataset
        patched_fit.before_callbacks(model, dataset, iterator.num_batches, iterator)
    of_keras(model, iterator=iterator, data_batch=data_batch)


def get_data_handler(of_keras: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace the function of tf_keras that fit calls before the callbacks begin."""
    handler = of_keras(*args, **kwargs)
    patched_fit.before_callbacks(kwargs.get("model"), handler._dataset, handler.inferred_steps)
    return handler


def pass_first_batch(model: Any, look: Callable[[Any], None]) -> None:
    """Let a function see the first batch that the next step gets, or None at the end of the data.

    No batch is read twice, so generators and shuffled data go on as without it. Ragged and sparse
    tensors cannot be passed.
    """
    function = model.train_function
    steps = int(getattr(model, "steps_per_execution", None) or 1)  # a variable in tf_keras

    def with_a_look(iterator: Any) -> Any:
        model.train_function = function  # for all later steps
        batches = list(itertools.islice(iterator, steps))
        look(batches[0] if batches else None)
        if batches and isinstance(iterator, tf.data.Iterator):
            return function(again(batches, iterator.element_spec))
        return function(iter(batches) if batches and not isinstance(iterator, list) else iterator)

    model.train_function = with_a_look


def again(batches: Sequence[Any], element_spec: Any) -> Any:
    """An iterator over these batches that a compiled step cannot tell from the one they are of."""
    specs = tf.nest.flatten(element_spec, expand_composites=True)

    def loosen(*batch: Any) -> Any:  # tensors have static shapes otherwise
        parts = [
            tf.raw_ops.PlaceholderWithDefault(input=part, shape=spec.shape)
            for part, spec in zip(
                tf.nest.flatten(batch, expand_composites=True), specs, strict=True
            )
        ]
        return tf.nest.pack_sequence_as(element_spec, parts, expand_composites=True)

    every = [tf.data.Dataset.from_tensors(batch).map(loosen) for batch in batches]
    return iter(functools.reduce(tf.data.Dataset.concatenate, every))
