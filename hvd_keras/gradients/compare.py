"""Compares all that a step's result depends on besides the variables: options, losses, layers."""

import warnings
import zlib
from typing import Any

import numpy as np

from hvd_keras.gradients import model_ranks, specs
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import keras, outside_graphs
from hvd_keras.runtime.process_sets import ProcessSet

# Entries of configurations that may differ: names have counters, seeds differ by rank on purpose,
# initial values are broadcast, and preprocessing layers are compared by callbacks.
_MAY_DIFFER = {
    *("name", "seed", "module", "registered_name", "build_config", "shared_object_id"),
    *("batch_shape", "batch_input_shape", "vocabulary", "vocabulary_size", "input_vocabulary"),
    *("idf_weights", "bin_boundaries", "compile_config"),
}

Description = dict[str, str]


def of_optimizer(optimizer: Any) -> Description:
    """Describe an optimizer: its class and configuration, without a plain learning rate."""
    # A plain learning rate is a variable; it is broadcast, and compared later.
    name = type(optimizer).__name__
    # Flat, by path, so that an error names the option that differs and nothing else.
    with outside_graphs():  # learning rates are read
        try:
            config = optimizer.get_config()
        except Exception:  # an optimizer of TensorFlow 1, or one that cannot be saved
            plain = (bool, int, float, str)
            config = {k: v for k, v in vars(optimizer).items() if isinstance(v, plain)}
    if not isinstance(config.get("learning_rate"), dict):
        config = {key: value for key, value in config.items() if key != "learning_rate"}
    return {"optimizer": name, **flat(config, f"optimizer {name}")}


# Ends the name of a layer that belongs to this rank alone.
_LOCAL = " of one rank"


@outside_graphs()  # type: ignore[untyped-decorator]
def of_training(model: Any) -> Description:
    """Describe what a step of ``fit`` depends on: optimizers, loss, options and layers."""
    found: Description = {}
    for i, optimizer in enumerate(model_ranks.optimizers_of(model)):
        prefix = f"{i + 1}. " if i else ""
        found |= {prefix + key: value for key, value in of_optimizer(optimizer).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a lambda is unsafe to save
        try:
            weights = model.get_compile_config()["loss_weights"]
        except Exception:  # what cannot be saved cannot be compared
            weights = None
    found |= flat({"loss": getattr(model, "loss", None), "loss_weights": weights}, "compile")
    for option in ("jit_compile", "run_eagerly"):
        found[f"compile.{option}"] = repr(bool(getattr(model, option, False)))
    # A variable in tf_keras.
    steps = getattr(model, "steps_per_execution", 1)
    found["compile.steps_per_execution"] = repr(int(steps or 1))
    found["keras.config"] = f"floatx {keras.backend.floatx()}, epsilon {keras.backend.epsilon()}"
    for i, layer in enumerate(model._flatten_layers()):
        key = f"layer {i} {type(layer).__name__}"
        if any(variable in model_ranks.local_variables for variable in layer.variables):
            found[key + _LOCAL] = ""
            continue
        # Containers consist of layers that follow; their configurations would repeat these.
        policy = getattr(layer, "dtype_policy", None)
        found[key] = f"dtype {getattr(policy, 'name', policy)}, trainable {layer.trainable}"
        if not any(True for _ in layer._flatten_layers(recursive=False, include_self=False)):
            try:
                found |= flat(layer.get_config(), key)
            except Exception:  # a layer that cannot be saved
                continue
    return found


def flat(value: Any, path: str) -> Description:
    """Describe a value, such as a configuration of Keras, by path."""
    if isinstance(value, dict):
        found = {}
        if "class_name" in value:
            found[path] = str(value["class_name"])
            value = {"config": value.get("config")} if found[path] != "__lambda__" else {}
        for key, part in value.items():
            if key not in _MAY_DIFFER and not str(key).endswith("_initializer"):
                found |= flat(part, path if key == "config" else f"{path}.{key}")
        return found
    if isinstance(value, (list, tuple)):
        parts = (flat(part, f"{path}[{i}]") for i, part in enumerate(value))
        return {key: text for part in parts for key, text in part.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        text = f"{value.dtype}{list(value.shape)} {zlib.crc32(value.tobytes()):08x}"
    elif hasattr(value, "get_config") and not isinstance(value, type):
        # Some losses of Keras leave arguments out of their configuration.
        arguments = getattr(value, "_fn_kwargs", {})
        return {path: type(value).__name__, **flat(arguments | value.get_config(), path)}
    else:
        text = str(getattr(value, "__name__", type(value).__name__))
    return {path: text if len(text) <= 100 else f"{text[:60]}… {zlib.crc32(text.encode()):08x}"}


def check(name: str, mine: Description, process_set: ProcessSet) -> None:
    """Raise a ValueError on every rank that shows how the ranks' descriptions differ, if they do.

    A layer that belongs to one rank alone is described on other ranks only, and not compared.
    """
    gathered = agree.gather_if_different(name, mine, process_set)
    if gathered is None:
        return
    local = {key for view in gathered for key in view if key.endswith(_LOCAL)}
    views = {
        rank: {
            k: v
            for k, v in view.items()
            if not any(k.startswith(key[: -len(_LOCAL)]) for key in local)
        }
        for rank, view in zip(process_set.ranks, gathered, strict=True)
    }
    if all(view == views[process_set.ranks[0]] for view in views.values()):
        return
    specs.raise_difference(
        views,
        "Give all ranks the same optimizer, loss, layers and arguments. Only the learning rate is "
        "broadcast.",
    )
