"""Compares what must be equal on all ranks that train a model, besides its variables' shapes.

Before the first step: everything that a step's result depends on, and whether the ranks have
different rows. Later: the values of the variables.
"""

import hashlib
import itertools
import json
import math
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import agreement, model_ranks
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import is_legacy, keras
from hvd_keras.runtime.process_sets import ProcessSet

# Entries of configurations that may differ: names have counters, seeds differ by rank on purpose,
# initial values are broadcast, and preprocessing layers are compared by callbacks.
_MAY_DIFFER = {
    *("name", "seed", "module", "registered_name", "build_config", "shared_object_id"),
    *("batch_shape", "batch_input_shape", "vocabulary", "vocabulary_size", "input_vocabulary"),
    *("idf_weights", "bin_boundaries", "compile_config"),
}

Description = dict[str, str]

# A check of a part of the values reads so many bytes and variables, takes this share of the time,
# and comes after this many steps at the earliest.
_BYTES = 1 << 18
_MOST_PIECES = 64
_SHARE = 0.004
_STEPS = 50

_ROWS = 64  # of which the rows of all ranks are compared


def of_optimizer(optimizer: Any) -> Description:
    """Describe an optimizer: its class and configuration, without a plain learning rate.

    A plain learning rate is a variable; it is broadcast, and compared later.
    """
    name = type(optimizer).__name__
    with tf.init_scope():  # learning rates are read
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
        found[key] = f"dtype {_name_of_policy(layer)}, trainable {layer.trainable}"
        if not any(True for _ in layer._flatten_layers(recursive=False, include_self=False)):
            try:
                found |= flat(layer.get_config(), key)
            except Exception:  # a layer that cannot be saved
                continue
    return found


def _name_of_policy(layer: Any) -> str:
    policy = getattr(layer, "dtype_policy", None)
    return str(getattr(policy, "name", policy))


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


def digest(description: Description) -> str:
    """Return a hash of a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def check_difference(name: str, mine: Description, process_set: ProcessSet) -> None:
    """Raise an error on every rank, after the ranks have seen that their descriptions differ.

    A layer that belongs to one rank alone is described on other ranks only, and not compared.

    Args:
        name: identifies the call on all ranks.
        mine: this rank's description.
        process_set: the ranks that take part.

    Raises:
        ValueError: the text shows the entries that differ.
    """
    gathered = agree.gather_json(f"{name} in full", mine, process_set)
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
    agreement.raise_difference(
        views,
        "Give all ranks the same optimizer, loss, layers and arguments. Only the learning rate is "
        "broadcast.",
    )


def of_rows(data: Any) -> list[int] | None:
    """Describe rows: their number and a hash of the first ones; None if they say nothing.

    Args:
        data: arrays, or tensors of a batch, of any structure.
    """
    crc, differ, rows = 0, False, 0
    for part in tf.nest.flatten(data):
        if part is None:
            continue
        if not getattr(part, "shape", ()) or not hasattr(part, "dtype"):
            return None
        rows = int(part.shape[0])
        head = np.asarray(part[:_ROWS])
        crc = _crc(head, crc)
        differ |= bool((head != head[:1]).any())
    return [rows, crc] if differ else None


def pass_first_batch(model: Any, look: Callable[[Any], None]) -> None:
    """Lets a function see the first batch that the next step gets, or None at the end of the data.

    No batch is read twice, so generators and shuffled data go on as without it.
    """
    train_function = model.train_function
    # A variable in tf_keras.
    name = "_steps_per_execution" if is_legacy else "steps_per_execution"
    steps = int(getattr(model, name, None) or 1)

    def with_a_look(iterator: Any) -> Any:
        model.train_function = train_function
        batches = list(itertools.islice(iterator, steps))
        look(batches[0] if batches else None)
        return train_function(_again(batches, iterator.element_spec) if batches else iterator)

    model.train_function = with_a_look


def can_be_passed(element_spec: Any) -> bool:
    """Whether ``pass_first_batch`` works for such elements of a dataset."""
    return all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(element_spec))


def _again(batches: Sequence[Any], element_spec: Any) -> Any:
    """An iterator over these batches that a compiled step cannot tell from the one they are of."""
    specs = tf.nest.flatten(element_spec)

    def loosen(*batch: Any) -> Any:  # tensors have static shapes otherwise
        parts = [
            tf.raw_ops.PlaceholderWithDefault(input=part, shape=spec.shape)
            for part, spec in zip(tf.nest.flatten(batch), specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(element_spec, parts)

    again: Any = tf.data.Dataset.from_tensors(batches[0]).map(loosen)
    for batch in batches[1:]:
        again = again.concatenate(tf.data.Dataset.from_tensors(batch).map(loosen))
    return iter(again)


class Values:
    """The values of variables that must be equal on all ranks while they train.

    Args:
        variables: of a model and its optimizers, the same on all ranks.
        process_set: the ranks.

    Attributes:
        steps: how many steps have ended.
        reported: a difference was found.
    """

    def __init__(self, variables: Sequence[Any], process_set: ProcessSet) -> None:
        self.variables = variables
        self.process_set = process_set
        self._scalars = [v for v in variables if not tuple(v.shape)]
        self._pieces = itertools.cycle(self._large())
        self.steps = 0
        self._next = _STEPS
        self._cost = 0.0
        self._since: tuple[int, float] | None = None
        self.reported = False

    def _large(self) -> list[tuple[Any, slice | None]]:
        """Return the variables, in pieces: variable and rows; None: all rows."""
        pieces = []
        for variable in self.variables:
            if tuple(variable.shape):
                size = agreement.size_in_bytes(agreement.spec_of(variable))
                rows = int(variable.shape[0])
                step = max(1, rows * _BYTES // max(1, size))
                parts = [slice(row, row + step) for row in range(0, rows, step)]
                pieces += [(variable, part if len(parts) > 1 else None) for part in parts]
        return pieces

    def different(self, name: str) -> str | None:
        """Compare all values. Returns the first variable that differs, and how many; or None."""
        mine = [_crc(tf.convert_to_tensor(variable)) for variable in self.variables]
        # One number first; those of all variables travel only if it differs.
        gathered = agree.gather_json(name, zlib.crc32(json.dumps(mine).encode()), self.process_set)
        if len(set(gathered)) == 1:
            return None
        by_rank = agree.gather_json("values of each variable", mine, self.process_set)
        if len({len(values) for values in by_rank}) > 1:
            return "the number of its variables"
        differing = [
            variable
            for variable, values in zip(self.variables, zip(*by_rank, strict=True), strict=True)
            if len(set(values)) > 1
        ]
        path = getattr(differing[0], "path", differing[0].name)
        more = len(differing) - 1
        return f"{path}" + (f", and {more} more" if more else "")

    def different_after_step(self) -> str | None:
        """Compare a part of the values from time to time, called after each step.

        All ranks know what the slowest has measured, so they choose the same next step.
        """
        self.steps += 1
        if self._since is None:
            self._since = self.steps, time.perf_counter()  # the first step was compiled
        if self.steps < self._next:
            return None
        begin = time.perf_counter()
        steps, since = self._since
        per_step = (begin - since) / max(1, self.steps - steps)
        part = self._part()
        # One row of 24 bytes: a checksum, what a comparison costs, the time of a step.
        mine = np.array([[part, max(self._cost, time.perf_counter() - begin), per_step]])
        gathered = agree.run_now(
            lambda: ops.allgather(mine, "a part of the values", process_set=self.process_set)
        )
        interval = gathered[:, 1].max() / (_SHARE * max(1e-6, gathered[:, 2].min()))
        self._next = self.steps + max(_STEPS, math.ceil(interval))
        self._cost = time.perf_counter() - begin
        self._since = self.steps, time.perf_counter()
        return self.different("values") if len(set(gathered[:, 0])) > 1 else None

    def _part(self) -> int:
        crc = done = 0
        for variable in self._scalars:
            crc = _crc(tf.convert_to_tensor(variable), crc)
        for variable, part in itertools.islice(self._pieces, _MOST_PIECES):
            piece = tf.convert_to_tensor(variable)
            if part is not None:
                piece = piece[part]
            crc = _crc(piece, crc)
            done += piece.dtype.size * math.prod(piece.shape)
            if done >= _BYTES:
                break
        return crc


def _crc(tensor: Any, before: int = 0) -> int:
    values = np.ascontiguousarray(np.asarray(tensor)).reshape(-1)
    if values.dtype == object:  # text
        return zlib.crc32(repr(values.tolist()).encode(), before)
    return zlib.crc32(values.view(np.uint8).data, before)
