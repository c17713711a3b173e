"""Describes variables, options, losses and layers, and compares the ranks' descriptions.

These are all that the result of a step depends on, on every backend of Keras.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hvd_keras.gradients import buckets, model_ranks
from hvd_keras.runtime import agree, settings
from hvd_keras.runtime.keras import keras, outside_graphs
from hvd_keras.runtime.process_sets import ProcessSet

Description = dict[str, str]  # of one rank, by what is described

DIFFERENT_STEPS = (
    "the ranks skip different steps, so that they would average gradients of different steps. Skip "
    "a step on all ranks if one of them must: hvd.allreduce(condition, op=hvd.Min) == 1, with the "
    "condition as an int32"
)


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """What must be equal on all ranks about a variable: path, shape and dtype."""

    path: str  # common_path
    shape: tuple[int, ...]
    dtype: str  # such as "float32"

    @property
    def bytes(self) -> int:
        """For the most part: a size may be unknown, and a dtype one that is refused later."""
        known = math.prod(1 if size is None else size for size in self.shape)
        return known if self.dtype == "string" else known * agree.numpy_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}{list(self.shape)}"


def spec_of(variable: Any) -> VariableSpec:
    """Return the spec of a Keras variable, a ``tf.Variable`` or a tensor."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    # In TensorFlow 1, dimensions are objects and dtypes are reference types.
    sizes = (getattr(size, "value", size) for size in variable.shape)
    dtype = getattr(variable.dtype, "base_dtype", variable.dtype)
    return VariableSpec(common_path(path), tuple(sizes), getattr(dtype, "name", dtype))


def common_path(path: str) -> str:
    """Remove the suffixes by which Keras makes layer names unique from a variable's path."""
    # Keras counts the layers of a name per process, so the suffixes differ between ranks as soon as
    # one rank has created more models.
    return re.sub(r"(_\d+)?(:0)?(?=/|$)", "", path)


def in_buckets(
    variables: Iterable[Any], bytes_of: Callable[[Any], float] = lambda v: spec_of(v).bytes
) -> list[list[Any]]:
    """Return variables by the requests in which their values travel (``HVD_BUCKET_BYTES``)."""
    variables = list(variables)
    sizes = list(map(bytes_of, variables))
    # As gradients are grouped: few requests, none so large that its copy matters.
    filled = buckets.fill(sizes, settings.read().bucket_bytes)
    return [[variables[i] for i in bucket] for bucket in filled]


def check_specs(
    name: str, specs: Sequence[VariableSpec], process_set: ProcessSet
) -> tuple[VariableSpec, ...]:
    """Compare the ranks' variables: their number, order, paths, shapes and dtypes.

    A path may begin later than another rank's: Keras puts the name of a model that was built in its
    first step into the paths of its variables, and leaves it out when the model is loaded from a
    file. Returns the specs with the longest path of each variable, the same on all ranks.

    Raises:
        ValueError: (on every rank) they differ.
    """
    mine = [[spec.path, spec.shape, spec.dtype] for spec in specs]
    differing = agree.gather_if_different(f"{name}.variables", mine, process_set)
    if differing is None:
        return tuple(specs)
    gathered = [
        [VariableSpec(path, tuple(shape), dtype) for path, shape, dtype in rank]
        for rank in differing
    ]
    # The specs of the k-th variables belong together.
    longest = tuple(
        max(of_ranks, key=lambda spec: len(spec.path)) for of_ranks in zip(*gathered, strict=False)
    )
    for rank in gathered:
        if len(rank) != len(longest) or not all(map(_fits, rank, longest)):
            views = [
                {f"variable {i}": str(spec) for i, spec in enumerate(rank)} for rank in gathered
            ]
            advice = (
                "Every rank must build the same layers, with the same names, in the same order."
            )
            _raise_difference(views, advice, process_set)
    return longest


def _fits(spec: VariableSpec, longest: VariableSpec) -> bool:
    is_end = f"/{longest.path}".endswith(f"/{spec.path}")
    return is_end and (spec.shape, spec.dtype) == (longest.shape, longest.dtype)


def _raise_difference(views: list[Description], advice: str, process_set: ProcessSet) -> None:
    """Raise the error about different models, with what each rank has and what to do."""
    lines = []
    different: tuple[str, ...] = ()
    for name in dict.fromkeys(name for view in views for name in view):
        if name.startswith(different) and any(name not in view for view in views):
            continue  # an argument of one of two classes, which are shown
        ranks: dict[str, list[int]] = {}  # by what they have
        for rank, view in zip(process_set.ranks, views, strict=True):
            ranks.setdefault(view.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            groups = (
                f"rank {own[0]} has {value}"
                if len(own) == 1
                else f"ranks {', '.join(map(str, own))} have {value}"
                for value, own in ranks.items()
            )
            lines.append(f"{name}: {', '.join(groups)}")
            different += (f"{name} ", f"{name}.")
    shown = "\n  ".join(lines[:5]) + (f"\n  and {len(lines) - 5} more" if len(lines) > 5 else "")
    draws = "each rank draws hyperparameters separately: give the same seed on all ranks to the"
    if "keras_tuner" in sys.modules:
        advice += f" With KerasTuner, {draws} tuner, and each its directory: "
        advice += 'directory=f"tuning/{hvd.rank()}".'
    if "optuna" in sys.modules:
        advice += f" With Optuna, {draws} study's sampler, as in TPESampler(seed=1)."
    raise ValueError(f"The ranks train different models:\n  {shown}\n{advice}")


# Entries of configurations that may differ: names have counters, seeds differ by rank on purpose,
# initial values are broadcast, files may lie elsewhere, and callbacks compare preprocessing layers.
_MAY_DIFFER = {
    *("name", "seed", "module", "registered_name", "build_config", "shared_object_id"),
    *("batch_shape", "batch_input_shape", "vocabulary", "vocabulary_size", "input_vocabulary"),
    *("idf_weights", "bin_boundaries", "compile_config", "filepath"),
}

# By process set: the ranks of one set use the same optimizers, those of another may differ.
_numbers: collections.defaultdict[int, Iterator[int]] = collections.defaultdict(itertools.count)


class Named:
    """What exchanges gradients or weights, under a name that is the same on all ranks.

    One without a name is numbered at its first exchange: a rank may make a model, or load one, that
    it does not train.
    """

    def __init__(self, name: str | None, process_set: ProcessSet) -> None:
        self._given_name, self.process_set = name, process_set

    @functools.cached_property
    def name(self) -> str:
        """Identifies it on all ranks of its process set."""
        return self._given_name or f"optimizer {next(_numbers[self.process_set.id()])}"


def describe_optimizer(optimizer: Any) -> Description:
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
def describe_model(model: Any) -> Description:
    """Describe what a step of ``fit`` depends on: optimizers, loss, options and layers."""
    found: Description = {}
    for i, optimizer in enumerate(model_ranks.optimizers_of(model)):
        prefix = f"{i + 1}. " if i else ""
        found |= {prefix + key: value for key, value in describe_optimizer(optimizer).items()}
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
        text = f"{value.dtype}{list(value.shape)} {agree.digest(value):016x}"
    elif hasattr(value, "get_config") and not isinstance(value, type):
        # Some losses of Keras leave arguments out of their configuration.
        arguments = getattr(value, "_fn_kwargs", {})
        return {path: type(value).__name__, **flat(arguments | value.get_config(), path)}
    else:
        text = str(getattr(value, "__name__", type(value).__name__))
    return {path: text if len(text) <= 100 else f"{text[:60]}… {agree.digest(text):016x}"}


def check_described(name: str, mine: Description, process_set: ProcessSet) -> None:
    """Raise a ValueError on every rank that shows how the ranks' descriptions differ, if they do.

    A layer that belongs to one rank alone is described on other ranks only, and not compared.
    """
    gathered = agree.gather_if_different(name, mine, process_set)
    if gathered is None:
        return
    found = {key for view in gathered for key in view if key.endswith(_LOCAL)}
    local = tuple(key.removesuffix(_LOCAL) for key in found)
    views = [{k: v for k, v in view.items() if not k.startswith(local)} for view in gathered]
    if any(view != views[0] for view in views):
        advice = (
            "Give all ranks the same optimizer, loss, layers and arguments. Only the learning rate "
            "is broadcast."
        )
        _raise_difference(views, advice, process_set)
