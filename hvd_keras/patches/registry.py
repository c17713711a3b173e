"""What ``init`` does for Keras on TensorFlow, with all changes of classes of Keras.

Each row names a class or a module, the attribute that changes, and the reason. In a job of one
rank, and for models that no distributed optimizer trains, what is changed behaves as before.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow.saved_model.experimental

from hvd_keras.compat import legacy_keras
from hvd_keras.gradients import missing_calls, origin, shards, zero
from hvd_keras.ops import derivatives as derivatives  # which registers them
from hvd_keras.patches import fit_on_tensorflow, keras_classes, losses, patched_fit
from hvd_keras.runtime import gpu, libraries, log
from hvd_keras.runtime.keras import is_legacy, keras, replace, require
from hvd_keras.saving import storage
from hvd_keras.training import broadcasting

#: Before the job is joined: load the ops.
load = libraries.tensorflow_ops
#: Give this process its GPU: by local rank, and the number of processes of its host.
pin = gpu.pin
#: What ``hvd_keras.check`` prints of it, and the names of the GPUs.
facts = libraries.tensorflow_facts

# An owner, its attribute, the reason, and what takes its place and gets the old one first.
Patch = tuple[Any, str, str, Callable[..., Any]]


@functools.cache
def install() -> None:
    """Change Keras for several ranks: apply all patches, unless they are applied already.

    Raises:
        RuntimeError: the installed Keras lacks an attribute; the text names versions that have it.
    """
    if is_legacy:
        rows = _legacy_rows()
    else:
        rows = _rows()
        _require_what_is_read()
    for owner, attribute, reason, _ in rows:
        require(owner, attribute, reason)
    # All rows are there, so nothing is left half patched.
    if is_legacy:
        keras.optimizers.legacy.Optimizer.build = legacy_keras.build  # which it did not have
    for owner, attribute, _, new in rows:
        replace(owner, attribute, new)
    log.logger.debug("%d attributes of Keras were changed", len(rows))


def _require_what_is_read() -> None:
    """Check attributes that are only read, and whose absence would go unnoticed."""
    # In TensorFlow 1 a script may still enable eager execution if there is no default graph yet.
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.Graph().as_default():
        # With a name, or Keras would number the user's first layer and model as the second; with a
        # dtype, or Keras would fix the default one, before a script calls set_floatx().
        layer = keras.layers.Layer(name="hvd_keras", dtype="float32")
        model = keras.Model(name="hvd_keras", dtype="float32")
    require(layer, "_seed_generators", "to give each rank its own randomness")
    require(layer, "_flatten_layers", "to find the layers of a model")
    require(model, "_initial_epoch", "to continue with the epoch of a checkpoint")
    require(model, "_compile_metrics", "to compute metrics over all ranks")
    require(model, "_loss_tracker", "to count samples")
    require(model, "_get_metrics_result_or_logs", "to compute metrics over all ranks")
    require(keras.callbacks.ModelCheckpoint, "_save_model", "to write checkpoints on one rank")


def _rows() -> list[Patch]:
    model, layers = keras.Model, keras.layers
    optimizer, scaled = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    adagrad, bar = keras.optimizers.Adagrad, keras.callbacks.ProgbarLogger
    (hdf5, _) = storage.writers()[-1]
    return [
        (model, "_maybe_symbolic_build", _VARIABLES, fit_on_tensorflow.build),
        (bar, "set_params", "to show one rank's progress bar by default", patched_fit.set_params),
        (optimizer, "apply", _NOT_DISTRIBUTED, missing_calls.apply),
        (optimizer, "add_variable_from_reference", "to divide slots", shards.add_slot),
        (adagrad, "update_step", "to update rows alone", keras_classes.update_rows),
        (scaled, "apply", "to exchange gradients early", keras_classes.apply_scaled),
        (scaled, "save_own_variables", "to write whole slots (shard_state)", zero.save_or_load),
        (scaled, "load_own_variables", "to read whole slots (shard_state)", zero.save_or_load),
        (scaled, "check_finite", "to skip a step or none", keras_classes.check_finite),
        (layers.BatchNormalization, "_moments", _SYNCHRONIZE, keras_classes.moments),
        (layers.Embedding, "call", "to look up rows alone", keras_classes.look_up),
        (keras.metrics.MeanMetricWrapper, "update_state", _OF_ALL_ROWS, losses.update),
        *((owner, name, _WHOLE_FILES, _save_file) for owner, name in storage.writers()),
        (model, "export", _NO_PARTS, _refuse_parts),
        (hdf5, "save_weights_to_hdf5_group", _NO_PARTS, _refuse_parts),
        (hdf5, "save_optimizer_weights_to_hdf5_group", _NO_PARTS, _refuse_parts),
        (tensorflow.saved_model, "save", _NO_PARTS, _refuse_tracked_parts),
        (tf.train.Checkpoint, "_write", _NO_PARTS, _refuse_tracked_parts),
        *_common_rows(),
    ]


def _refuse_parts(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace what writes the variables of a model or an optimizer, but for .keras files."""
    for one in args:
        shards.refuse_parts(getattr(one, "variables", ()))
    return write(*args, **kwargs)


def _refuse_tracked_parts(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace what writes all variables that an object of TensorFlow tracks."""
    roots = (*args, *kwargs.values())
    for root in (one for one in roots if isinstance(one, tf.__internal__.tracking.Trackable)):
        for one in tf.train.TrackableView(root).descendants():
            # Keras's containers of layers are not tracked.
            is_of_keras = isinstance(one, (keras.layers.Layer, keras.optimizers.Optimizer))
            shards.refuse_parts([one, *(one.variables if is_of_keras else ())])
    return write(*args, **kwargs)


def _legacy_rows() -> list[Patch]:
    new, old = keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer
    moments = "_sync_calculate_mean_and_var"
    batch_norm = next(c for c in keras.layers.BatchNormalization.__mro__ if moments in vars(c))
    data = importlib.import_module("tf_keras.src.engine.data_adapter")
    return [
        (data, "get_data_handler", _VARIABLES, fit_on_tensorflow.get_data_handler),
        (new, "apply_gradients", _NOT_DISTRIBUTED, missing_calls.apply_pairs),
        (old, "apply_gradients", _NOT_DISTRIBUTED, missing_calls.apply_pairs),
        (batch_norm, moments, _SYNCHRONIZE, keras_classes.legacy_moments),
        (keras.Model, "save", _WHOLE_FILES, _save_file),
        (keras.Model, "save_weights", _WHOLE_FILES, _save_file),
        *_common_rows(),
    ]


_CHANGES = "to find gradients that a script changes"
_CLIPS = ("value", "norm", "global_norm")
_NOT_DISTRIBUTED = "to find optimizers that are not distributed"
_SYNCHRONIZE = "to synchronize batch normalization between processes"
_OF_ALL_ROWS = "to compute functions of all ranks' rows"
_OF_STEPS = "to trace functions of a script for each kind of step"
_VARIABLES = "to make variables before the first step"
_WHOLE_FILES = "to replace files only by complete ones"
_NO_PARTS = "to refuse files of one rank's parts of tables"
_ONE_WRITER = "to write files on one rank alone"
_save_file = functools.partial(storage.save, False)


def _common_rows() -> list[Patch]:
    model = keras.Model
    export = functools.partial(storage.save, True)
    evaluate = functools.partial(patched_fit.evaluate, fit_on_tensorflow)
    fit = functools.partial(patched_fit.fit, fit_on_tensorflow)
    v1_optimizer = tf.compat.v1.train.Optimizer
    return [
        (model, "fit", "to wait for files and to find what differs", fit),
        (model, "export", _WHOLE_FILES, export),
        # Keras's export imports tensorflow.saved_model, a new module in the place of TensorFlow's
        # own one: so this file has imported it before.
        (tensorflow.saved_model, "save", _WHOLE_FILES, export),
        (model, "evaluate", _ONE_WRITER, evaluate),
        (model, "predict", _ONE_WRITER, evaluate),
        (v1_optimizer, "apply_gradients", _NOT_DISTRIBUTED, missing_calls.apply_pairs),
        (broadcasting.function_class, "__call__", _OF_STEPS, broadcasting.call_function),
        (tf.GradientTape, "gradient", _CHANGES, origin.record),
        (tf, "gradients", _CHANGES, origin.record_graph),
        *((tf, f"clip_by_{by}", _CHANGES, origin.record_clip) for by in _CLIPS),
        (keras.losses.Loss, "__call__", "to weigh the ranks' losses", losses.call),
    ]
