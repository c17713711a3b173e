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
from hvd_keras.gradients import clipping, losses, missing_calls, model_ranks, shards, zero
from hvd_keras.hooks import embedding_lookup, fitting, loss_scale, sync_batch_norm
from hvd_keras.runtime import log, rank_info
from hvd_keras.runtime.keras import is_legacy, keras, require
from hvd_keras.saving import storage


@dataclasses.dataclass(frozen=True)
class Patch:
    """One changed attribute of a class or module.

    Attributes:
        owner: the class or module.
        attribute: the name of the attribute.
        reason: why it is changed, as text.
        wrap: returns the new value for the old one, which is None if ``is_new``.
        is_new: the owner did not have this attribute.
    """

    owner: Any
    attribute: str
    reason: str
    wrap: Callable[[Any], Any]
    is_new: bool = False


_undo: list[tuple[Any, str, Any]] = []
_ABSENT = object()


def install() -> None:
    """Apply all patches, unless they are applied already.

    Raises:
        RuntimeError: the installed Keras lacks an attribute; the text names versions that have it.
    """
    if _undo:
        return
    rows = _legacy_rows() if is_legacy else _rows()
    if not is_legacy:
        _require_what_is_read()
    for row in rows:
        if not row.is_new:
            require(row.owner, row.attribute, row.reason)
    for row in rows:
        before = vars(row.owner).get(row.attribute, _ABSENT)
        old = None if row.is_new else getattr(row.owner, row.attribute)
        setattr(row.owner, row.attribute, row.wrap(old))
        _undo.append((row.owner, row.attribute, before))
    log.logger.debug("%d attributes of Keras were changed", len(rows))


def uninstall() -> None:
    """Undoes ``install``, for tests."""
    while _undo:
        owner, attribute, before = _undo.pop()
        if before is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


def _require_what_is_read() -> None:
    """Check attributes that are only read, and whose absence would go unnoticed."""
    # In TensorFlow 1 a script may still enable eager execution if there is no default graph yet.
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.Graph().as_default():
        # Named: otherwise Keras would number the user's first layer and model as the second.
        layer = keras.layers.Layer(name="hvd_keras")
        model = keras.Sequential(name="hvd_keras")
    require(layer, "_seed_generators", "to give each rank its own randomness")
    require(layer, "_flatten_layers", "to find the layers of a model")
    require(model, "_initial_epoch", "to continue with the epoch of a checkpoint")
    require(model, "_compile_metrics", "to compute metrics over all ranks")
    require(model, "_loss_tracker", "to count samples")
    require(model, "_get_metrics_result_or_logs", "to compute metrics over all ranks")
    require(keras.callbacks.ModelCheckpoint, "_save_model", "to write checkpoints on one rank")


def _rows() -> list[Patch]:
    model, optimizers, layers = keras.Model, keras.optimizers, keras.layers
    return [
        Patch(model, "fit", "to wait for files and to find what differs", fitting.wrap_fit),
        Patch(
            model,
            "_maybe_symbolic_build",
            "to make a model's variables before its first step",
            fitting.wrap_symbolic_build,
        ),
        Patch(
            keras.callbacks.ProgbarLogger,
            "set_params",
            "to show one rank's progress bar by default",
            fitting.wrap_bar,
        ),
        Patch(
            optimizers.Optimizer,
            "apply",
            "to find optimizers that are not distributed",
            _telling(_updated),
        ),
        Patch(
            optimizers.Optimizer,
            "add_variable_from_reference",
            "to know the slots of tables that are divided between ranks",
            shards.wrap_add_slot,
        ),
        Patch(
            optimizers.LossScaleOptimizer,
            "apply",
            "to exchange gradients while others are computed",
            loss_scale.wrap_apply,
        ),
        *(
            Patch(
                optimizers.LossScaleOptimizer,
                f"{verb}_own_variables",
                "to write and read whole slots (shard_state)",
                zero.wrap_files,
            )
            for verb in ("save", "load")
        ),
        Patch(
            optimizers.LossScaleOptimizer,
            "check_finite",
            "to skip a step on all ranks or on none",
            loss_scale.wrap_check_finite,
        ),
        Patch(
            layers.BatchNormalization,
            "_moments",
            "to synchronize batch normalization between processes",
            sync_batch_norm.wrap_moments,
        ),
        Patch(
            layers.Embedding,
            "call",
            "to read the rows that are looked up instead of the whole table",
            embedding_lookup.wrap_call,
        ),
        *_common_rows(),
    ]


def _legacy_rows() -> list[Patch]:
    optimizers = keras.optimizers

    def of_pairs(optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return [variable for _, variable in grads_and_vars]

    return [
        Patch(keras.Model, "fit", "to wait for files and to find what differs", fitting.wrap_fit),
        Patch(
            fitting.legacy_data_module(),
            "get_data_handler",
            "to make a model's variables before its first step",
            fitting.wrap_get_data_handler,
        ),
        *(
            Patch(
                owner,
                "apply_gradients",
                "to find optimizers that are not distributed",
                _telling(of_pairs),
            )
            for owner in (optimizers.Optimizer, optimizers.legacy.Optimizer)
        ),
        Patch(
            optimizers.legacy.Optimizer,
            "build",
            "to make an optimizer's variables before its first step",
            legacy_keras.add_build,
            is_new=True,
        ),
        Patch(
            sync_batch_norm.legacy_class(),
            sync_batch_norm.LEGACY_METHOD,
            "to synchronize batch normalization between processes",
            sync_batch_norm.wrap_legacy_moments,
        ),
        *_common_rows(),
    ]


_WHOLE_FILES = "to replace files only by complete ones"


def _common_rows() -> list[Patch]:
    return [
        *(
            Patch(keras.Model, name, _WHOLE_FILES, storage.wrap_save)
            for name in ("save", "save_weights")
        ),
        Patch(
            keras.losses.Loss,
            "__call__",
            "to weigh the ranks' losses as one process does",
            losses.wrap_call,
        ),
        # Keras's export imports tensorflow.saved_model, a new module in the place of TensorFlow's
        # own one: so this file has imported it before.
        *(
            Patch(owner, name, _WHOLE_FILES, functools.partial(storage.wrap_save, folders=True))
            for owner, name in ((keras.Model, "export"), (tensorflow.saved_model, "save"))
        ),
        *(
            Patch(keras.Model, name, "to write files on one rank alone", fitting.wrap_evaluate)
            for name in ("evaluate", "predict")
        ),
    ]


def _updated(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """The variables that ``apply`` updates: by default, those that the optimizer was built for."""
    if trainable_variables is None:
        return getattr(optimizer, "_trainable_variables", ())
    return trainable_variables


def _telling(variables_of: Callable[..., Any]) -> Callable[[Any], Any]:
    """Wrap a method that applies gradients: warns if they were not exchanged."""

    def wrap(method: Any) -> Any:
        def apply(self: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, "_hvd_reducer"):
                grads = list(grads)
                variables = list(variables_of(self, grads, *args, **kwargs))
                missing_calls.check_optimizer(self, variables)
                several = rank_info.is_initialized() and rank_info.size() > 1
                local = model_ranks.local_variables if several else ()
                clipping.check_alone(self, variables, local)
            return method(self, grads, *args, **kwargs)

        apply.__doc__ = method.__doc__
        return apply

    return wrap
