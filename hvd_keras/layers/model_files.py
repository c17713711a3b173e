"""``save_model``: a plain ``.keras`` file of a model of which each rank has a part."""

import collections
import contextlib
import datetime
import functools
import json
import os
import pathlib
import secrets
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from hvd_keras import ops, optimizer
from hvd_keras.gradients import missing_calls, model_ranks, shards
from hvd_keras.layers.embedding import Embedding
from hvd_keras.ops.reduction import Compression, Compressor
from hvd_keras.runtime import agree, process_sets
from hvd_keras.runtime.keras import innermost, is_legacy, keras, require
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.saving import storage

# The parts of a .keras file.
_WEIGHTS, _CONFIG = "model.weights.h5", "config.json"
_METADATA, _ASSETS = "metadata.json", "assets"


def save_model(
    model: keras.Model,
    filepath: str | os.PathLike[str],
    process_set: ProcessSet = global_process_set,
) -> None:
    """Save a model whose tables or optimizer are divided between ranks. All ranks must call it.

    The first rank writes the file, atomically, and gets the tables block by block, so that no rank
    holds a whole one. Each ``hvd.layers.Embedding`` without ``combiner`` is written as a plain
    ``keras.layers.Embedding``: ``keras.models.load_model`` loads the file without hvd_keras. With
    ``combiner``, and in ``hvd.layers.Embeddings``, it stays what it is, and loading needs
    ``import hvd_keras`` and ``init()``. ``hvd.load_model`` divides the tables again.

    Optimizers with ``shard_state=True``, also in attributes, are saved as plain ones with the whole
    state, unless tables are divided, too. Without one, no optimizer is saved: to continue training,
    use ``hvd.callbacks.Checkpoint``.

    Args:
        model: built, and equal on all ranks but for the tables and the optimizer.
        filepath: ends in ``.keras``; its folder is created if necessary.
        process_set: the ranks that train the model.

    Raises:
        ValueError: the file's name does not end in ``.keras``, or tf_keras is in use.
        TypeError: ``model`` is no model.
        OSError: (on all ranks) the file cannot be written.
    """
    if is_legacy:
        raise ValueError("hvd.save_model needs Keras 3, but tf_keras is in use. Use model.save.")
    if not str(filepath).endswith(".keras"):
        raise ValueError(f"hvd.save_model: got {filepath}, expected a name that ends in .keras.")
    if not isinstance(model, keras.Model):
        raise TypeError(f"hvd.save_model: got {model!r:.99}, expected a keras.Model.")
    process_sets.check(process_set, "save_model")
    parts = [
        layer.embeddings
        for layer in model._flatten_layers()
        if isinstance(layer, Embedding) and layer.built and layer.layout is not None
    ]
    shares = filter(model_ranks.is_sharded, model_ranks.optimizers_of(model, within=True))
    variables = [variable for one in shares for variable in one.variables]
    with_optimizer = bool(variables) and not parts
    if with_optimizer:
        slots = {shards.variable_id(v): v for v in variables if shards.of(v) is not None}
        parts = list(slots.values())
    # All ranks go through these once, in one order: each block is a collective.
    streams = [shards.blocks(part, to_leader=True) for part in parts]

    fill = functools.partial(_write, model, list(zip(parts, streams, strict=True)), with_optimizer)

    def write() -> None:
        try:
            storage.write_whole(filepath, fill)
        finally:
            _exhaust(streams)  # the other ranks send all, whatever happens here

    if process_set.rank() > 0:
        _exhaust(streams)
    agree.on_leader(f"hvd.save_model: cannot write {filepath}", write, process_set)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    shard_state: bool = False,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    op: ops.ReduceOp = ops.Average,
) -> keras.Model:
    """``keras.models.load_model``, for training on all ranks.

    The optimizer of the file is wrapped in ``DistributedOptimizer`` and keeps its state, so
    training continues where it was, if it gets the same arguments, which no file has. Tables that
    were divided between ranks when ``hvd.save_model`` wrote the file are divided again, between any
    number of ranks; each reads its part. Such a file has no optimizer: compile the model. Every
    rank reads the file.

    Args:
        filepath: a file that ``model.save`` or ``hvd.save_model`` has written, on one process or on
            several.
        custom_optimizers: optimizer classes of your own that the file may name.
        custom_objects: other classes and functions that the file may name; a function that makes
            an optimizer may call ``DistributedOptimizer`` itself.
        compression, shard_state, op: as in ``DistributedOptimizer``.
        backward_passes_per_step, average_aggregated_gradients: the same. If the optimizer has
            ``gradient_accumulation_steps`` and both are left out, an update takes the mean of the
            local steps, and the first rank warns.

    Returns:
        The model.

    Raises:
        ValueError: the file is missing; or it has no optimizer and was not written by
            ``hvd.save_model``.

    Example:
        model = hvd.load_model("checkpoints/model.keras")
        model.fit(data)
    """
    found: dict[str, Any] | None = None  # what save_model notes of divided tables
    if not is_legacy and zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as archive:
            if _METADATA in archive.namelist():
                found = json.loads(archive.read(_METADATA)).get("hvd_keras")
            if found is not None:
                of_averages = compression is Compression.none and op is ops.Average
                if not of_averages or shard_state or backward_passes_per_step > 1:
                    missing_calls.tell(
                        f"hvd.load_model: {filepath} has divided tables and no optimizer. Give "
                        "arguments about an optimizer to hvd.DistributedOptimizer instead.",
                        global_process_set,
                    )
                return _load(archive, custom_objects)
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{filepath} has no optimizer: the model was saved before compile(), or for inference. "
            "Use keras.models.load_model, then compile() with a hvd.DistributedOptimizer."
        )
    updates = innermost(model.optimizer)
    # Keras's reader of HDF5 builds an optimizer for an empty list of variables.
    is_built = not is_legacy and model.trainable_variables and updates.built
    if is_built and not getattr(updates, "_trainable_variables", True):
        raise ValueError(
            f"Keras {keras.__version__} does not restore the optimizer of {filepath}: it would "
            "update no variable. Save the model as .keras. To load the weights of this file alone, "
            "use keras.models.load_model(filepath, compile=False), then compile() with a "
            "hvd.DistributedOptimizer."
        )
    if not optimizer.is_distributed(updates):
        steps = getattr(updates, "gradient_accumulation_steps", None)
        passes, averages = backward_passes_per_step, average_aggregated_gradients
        if steps and not is_legacy and passes == 1 and not averages:
            missing_calls.tell(
                f"hvd.load_model: the optimizer of {filepath} has gradient_accumulation_steps="
                f"{steps}, and an update takes the mean of these steps. If it was made with "
                f"backward_passes_per_step={steps}, updates took their sum: give load_model that. "
                "For the mean, give it average_aggregated_gradients=True.",
                global_process_set,
            )
        arguments: dict[str, Any] = {"compression": compression, "op": op}
        arguments["backward_passes_per_step"] = passes
        arguments["average_aggregated_gradients"] = averages
        if shard_state:
            _take_shares(model, arguments)
        else:
            optimizer.DistributedOptimizer(model.optimizer, "", **arguments)
    return model


def _take_shares(model: Any, arguments: dict[str, Any]) -> None:
    """Replace the optimizer of a model by one with a share of its state."""
    whole = model.optimizer
    share = optimizer.DistributedOptimizer(
        type(whole).from_config(whole.get_config()), shard_state=True, **arguments
    )
    share.build(model.trainable_variables)
    for variable, value in zip(share.variables, whole.variables, strict=True):
        shards.assign(variable, np.asarray(value))
    model.optimizer = share


def _exhaust(streams: Iterable[Iterator[Any]]) -> None:
    for stream in streams:
        for _ in stream:
            pass


def _library() -> Any:
    from keras.src.saving import saving_lib

    for name in ("H5IOStore", "DiskIOStore", "_save_state", "_load_state"):
        require(saving_lib, name, "to save models with tables that are divided between ranks")
    return saving_lib


def _write(
    model: Any,
    parts: list[tuple[Any, Iterator[Any]]],
    with_optimizer: bool,
    path: pathlib.Path,
) -> None:
    """Write a file with what variables are parts of, whose rows iterators yield."""
    library = _library()
    config = keras.saving.serialize_keras_object(model)
    metadata: dict[str, Any] = {
        "keras_version": keras.__version__,
        "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S"),
    }
    visited = set()
    if not with_optimizer:
        config = _as_plain({**config, "compile_config": None})
        metadata["hvd_keras"] = {"divided": len(parts)}
        every = filter(model_ranks.is_sharded, model_ranks.optimizers_of(model, within=True))
        visited = {id(getattr(model, "optimizer", None)), *map(id, every)}
    weights = path.with_name(_WEIGHTS)
    # In its place each part writes two numbers: one that occurs nowhere else, and its own.
    token = secrets.randbits(62)
    numbers = enumerate(shards.variable_id(variable) for variable, _ in parts)
    places = {key: np.array([token, i], np.int64) for i, key in numbers}
    # As Keras's own writer, but that parts get places of two numbers, which are filled later, and
    # that the optimizer may be left out.
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(_METADATA, json.dumps(metadata))
        archive.writestr(_CONFIG, json.dumps(config))
        with (
            contextlib.closing(library.DiskIOStore(_ASSETS, archive=archive, mode="w")) as assets,
            contextlib.closing(library.H5IOStore(weights, mode="w")) as store,
            agree.within(shards.saving_places, places),
        ):
            library._save_state(model, store, assets, "", visited)
        _fill(weights, token, parts)
        archive.write(weights, _WEIGHTS)
    weights.unlink()


def _fill(weights: pathlib.Path, token: int, parts: list[tuple[Any, Iterator[Any]]]) -> None:
    places: dict[int, list[str]] = collections.defaultdict(list)

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape == (2,) and item.dtype == np.int64:
            found, number = item[()]
            if found == token:
                places[int(number)].append(name)

    with h5py.File(weights, "r+") as file:
        file.visititems(note)
        for number, (variable, blocks) in enumerate(parts):
            shard: Any = shards.of(variable)
            dtype = tf.as_dtype(variable.dtype)
            # A LossScaleOptimizer writes the slots of the optimizer in it, and that does, too.
            targets = []
            for name in places[number]:
                del file[name]
                data = file.create_dataset(name, shard.shape, dtype.as_numpy_dtype)
                if dtype == tf.bfloat16:  # as Keras marks it
                    data.attrs["dtype"] = "bfloat16"
                targets.append(data)
            first = 0
            for block in blocks:
                for data in targets:
                    data[slice(first, first + len(block)) if data.shape else ()] = block
                first += len(block)


_OURS = {
    "module": Embedding.__module__,
    "class_name": "Embedding",
    "registered_name": "hvd_keras>Embedding",
}
_SHARD = "hvd_keras_shard"  # beside a layer's configuration, where Keras reads over it
_PLAIN = {"module": "keras.layers", "class_name": "Embedding", "registered_name": None}


def _as_plain(config: Any) -> Any:
    """Return a configuration with plain layers in the place of divided tables."""
    if isinstance(config, (list, tuple)):
        return [_as_plain(item) for item in config]
    name = config.get("registered_name") if isinstance(config, dict) else None
    if not isinstance(config, dict) or name == "hvd_keras>Embeddings":
        return config  # the latter needs its tables as they are
    if name == _OURS["registered_name"] and not config["config"]["combiner"]:
        own = {k: v for k, v in config["config"].items() if k not in ("shard", "combiner")}
        config = {**config, **_PLAIN, "config": own, _SHARD: config["config"]["shard"]}
    return {key: _as_plain(value) for key, value in config.items()}


def _as_divided(layer: dict[str, Any]) -> dict[str, Any]:
    """Undo that for a part of a configuration."""
    if _SHARD not in layer:
        return layer
    return {**layer, **_OURS, "config": {**layer["config"], "shard": layer[_SHARD]}}


def _load(archive: zipfile.ZipFile, custom_objects: dict[str, Any] | None) -> Any:
    """Load a file of ``save_model`` and divide its tables."""
    library = _library()
    config = json.loads(archive.read(_CONFIG), object_hook=_as_divided)
    model = keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
    errors: dict[Any, Any] = {}
    with contextlib.ExitStack() as stack:
        store = library.H5IOStore(_WEIGHTS, archive=archive, mode="r")
        stack.callback(store.close)
        assets = None
        if any(name.startswith(f"{_ASSETS}/") for name in archive.namelist()):
            assets = library.DiskIOStore(_ASSETS, archive=archive, mode="r")
            stack.callback(assets.close)
        library._load_state(
            model,
            weights_store=store,
            assets_store=assets,
            inner_path="",
            visited_saveables=set(),
            failed_saveables=set(),
            error_msgs=errors,
        )
    if errors:
        raise ValueError(f"{archive.filename} does not load: {errors}")
    return model
