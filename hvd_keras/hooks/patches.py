"""The registry of all changes that hvd_keras makes to classes of Keras.

Each row names a class, the attribute that changes, and the reason. In a job of one rank, and for
models that no distributed optimizer trains, the changed methods behave as before. docs/design.md
lists the rows.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow.saved_model.experimental

from hvd_keras.compat import legacy_keras
from hvd_keras.gradients import missing_calls, shards, zero
from hvd_keras.hooks import fitting, keras_classes, losses, tensorflow_fits, variables
from hvd_keras.runtime import log
from hvd_keras.runtime.keras import is_legacy, keras, require
from hvd_keras.saving import storage


@dataclasses.dataclass(frozen=True)
class Patch:
    """One changed attribute of a class or module."""

    owner: Any
    attribute: str
    reason: str
    wrap: Callable[[Any], Any]  # returns the new value for the old one; for None if ``is_new``
    is_new: bool = False  # the owner did not have this attribute


@functools.cache
def install() -> None:
    """Apply all patches, unless they are applied already.

    Raises:
        RuntimeError: the installed Keras lacks an attribute; the text names versions that have it.
    """
    rows = _legacy_rows() if is_legacy else _rows()
    if not is_legacy:
        _require_what_is_read()
    for row in rows:
        if not row.is_new:
            require(row.owner, row.attribute, row.reason)
    # All rows are there, so nothing is left half patched.
    for row in rows:
        old = None if row.is_new else getattr(row.owner, row.attribute)
        setattr(row.owner, row.attribute, row.wrap(old))
    variables.scaling = keras_classes.scaling
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
    adagrad = keras.optimizers.Adagrad
    bar, files = keras.callbacks.ProgbarLogger, zero.wrap_files
    return [
        Patch(model, "_maybe_symbolic_build", _VARIABLES, tensorflow_fits.wrap_symbolic_build),
        Patch(bar, "set_params", "to show one rank's progress bar by default", fitting.wrap_bar),
        Patch(optimizer, "apply", _NOT_DISTRIBUTED, missing_calls.wrap_apply()),
        Patch(optimizer, "add_variable_from_reference", "to divide slots", shards.wrap_add_slot),
        Patch(adagrad, "update_step", "to update rows alone", keras_classes.wrap_update_step),
        Patch(scaled, "apply", "to exchange gradients early", keras_classes.wrap_apply),
        Patch(scaled, "save_own_variables", "to write whole slots (shard_state)", files),
        Patch(scaled, "load_own_variables", "to read whole slots (shard_state)", files),
        Patch(scaled, "check_finite", "to skip a step or none", keras_classes.wrap_check_finite),
        Patch(layers.BatchNormalization, "_moments", _SYNCHRONIZE, keras_classes.wrap_moments),
        Patch(layers.Embedding, "call", "to look up rows alone", keras_classes.wrap_call),
        *_common_rows(),
    ]


def _legacy_rows() -> list[Patch]:
    new, old = keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer
    batch_norm, moments = keras_classes.legacy_class(), keras_classes.LEGACY_METHOD
    data = tensorflow_fits.legacy_data_module()

    def of_pairs(optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return [variable for _, variable in grads_and_vars]

    return [
        Patch(data, "get_data_handler", _VARIABLES, tensorflow_fits.wrap_get_data_handler),
        Patch(new, "apply_gradients", _NOT_DISTRIBUTED, missing_calls.wrap_apply(of_pairs)),
        Patch(old, "apply_gradients", _NOT_DISTRIBUTED, missing_calls.wrap_apply(of_pairs)),
        Patch(old, "build", _VARIABLES, legacy_keras.add_build, is_new=True),
        Patch(batch_norm, moments, _SYNCHRONIZE, keras_classes.wrap_legacy_moments),
        *_common_rows(),
    ]


_NOT_DISTRIBUTED = "to find optimizers that are not distributed"
_SYNCHRONIZE = "to synchronize batch normalization between processes"
_VARIABLES = "to make variables before the first step"
_WHOLE_FILES = "to replace files only by complete ones"
_ONE_WRITER = "to write files on one rank alone"


def _common_rows() -> list[Patch]:
    model = keras.Model
    wrap_folder = functools.partial(storage.wrap_save, folders=True)
    wrap_fit = functools.partial(fitting.wrap_fit, tensorflow_fits)
    wrap_evaluate = functools.partial(fitting.wrap_evaluate, tensorflow_fits)
    return [
        Patch(model, "fit", "to wait for files and to find what differs", wrap_fit),
        Patch(model, "save", _WHOLE_FILES, storage.wrap_save),
        Patch(model, "save_weights", _WHOLE_FILES, storage.wrap_save),
        Patch(model, "export", _WHOLE_FILES, wrap_folder),
        # Keras's export imports tensorflow.saved_model, a new module in the place of TensorFlow's
        # own one: so this file has imported it before.
        Patch(tensorflow.saved_model, "save", _WHOLE_FILES, wrap_folder),
        Patch(model, "evaluate", _ONE_WRITER, wrap_evaluate),
        Patch(model, "predict", _ONE_WRITER, wrap_evaluate),
        Patch(keras.losses.Loss, "__call__", "to weigh the ranks' losses", losses.wrap_call),
    ]
