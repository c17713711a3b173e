"""Turns automatic mode on: seeds, patches of Keras, output and files on the first rank alone."""

import atexit
import functools
import importlib
import os
import random
import re
import runpy
import secrets
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_keras
from hvd_keras import lifecycle
from hvd_keras.auto import brain, distribution, generators, noise, scale, steps, writes
from hvd_keras.gradients import division
from hvd_keras.runtime import agree, rank_info, settings
from hvd_keras.runtime.keras import is_legacy, replace, require


def auto(scale_batch: bool = False) -> None:
    """Let all ranks do the work of this script of one process together.

    To be called as a script's first line; ``hvdrun --auto`` does so. Every rank runs the whole
    script, and computes its part of each batch, with the results of one process: docs/auto.md.

    Args:
        scale_batch: as ``hvdrun --auto --scale-batch``: ``fit`` makes batches ``size()`` times
            larger, with a rate as much larger, and a warm-up; so it has other results.

    Raises:
        RuntimeError: the script calls ``hvd.init()``, too; or Keras is ``tf_keras``.
    """
    if division.is_on or brain.is_on():
        return
    if rank_info.is_initialized():
        _refuse_init()
    if is_legacy:
        raise RuntimeError("hvdrun --auto needs Keras 3, and TF_USE_LEGACY_KERAS is set. Unset it.")
    settings.be_strict()
    replace(sys, "excepthook", _tell_briefly)
    if one_brain := settings.read().one_brain:
        if scale_batch:
            raise RuntimeError("HVD_AUTO=brain has no --scale-batch. Leave one of them out.")
        brain.join()
    else:
        lifecycle.init()
    replace(hvd_keras, "init", _refuse_init)
    if rank_info.size() == 1:
        return
    for name in ("disable_eager_execution", "disable_v2_behavior"):
        replace(tf.compat.v1, name, _refuse_graphs)
    if one_brain:
        return
    division.is_on = True
    _seed()
    _replace_all(scale_batch)
    atexit.register(_check_exchange)
    atexit.register(generators.check)
    if rank_info.rank() > 0:
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The first rank's are enough, but for errors.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        writes.divert()


def prepare(model: Any) -> Any:
    """Let all ranks train a model together, in a script of one process; see ``hvd.auto``.

    Args:
        model: a ``keras.Model``; its training begins with the first rank's weights.

    Returns:
        The same model.

    Raises:
        RuntimeError: as ``hvd.auto``.
    """
    auto()
    return model


def _tell_briefly(hook: Callable[..., Any], kind: Any, value: Any, trace: Any) -> None:
    """Replace ``sys.excepthook``: of what is refused, show the script's line, not all calls."""
    sys.stderr = sys.__stderr__
    found = re.search("hvdrun --auto.*", str(value))
    if found is None or settings.read().all_tracebacks:
        hook(kind, value, trace)
        return
    packages = os.path.dirname(os.path.dirname(str(keras.__file__)))
    libraries = packages, *(os.path.dirname(str(home.__file__)) for home in (hvd_keras, runpy)), "<"
    own = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(libraries)][-1:]
    places = [f'File "{frame.filename}", line {frame.lineno}, {frame.line}' for frame in own]
    print(*places, f"{kind.__name__}: {found[0]}", sep="\n", file=sys.stderr)


def _seed() -> None:
    """Give all ranks the first one's seeds, so that unseeded random numbers are equal."""
    (seed, *_) = agree.gather_json("seed", secrets.randbelow(2**31))
    keras.utils.set_random_seed(seed)
    draw = functools.partial(random.Random(seed).randrange, 2**63)
    seeded = lambda rng, seed=None: rng(draw() if seed is None else seed)  # noqa: E731
    replace(np.random, "default_rng", seeded)


def _replace_all(scale_batch: bool) -> None:
    model, backup = keras.Model, keras.callbacks.BackupAndRestore
    # Its functions call a module of the backend, by this name.
    parallel = importlib.import_module("keras.src.distribution.distribution_lib")
    of_keras = importlib.import_module("keras.src.trainers.data_adapters.generator_data_adapter")
    rows: list[tuple[Any, str, Callable[..., Any]]] = [
        (model, "fit", _begin_and_fit),
        *((model, f"make_{kind}_function", steps.make) for kind in ("train", "test", "predict")),
        *((model, name, _save_on_first) for name in ("save", "save_weights", "export")),
        *((home, "save_model", _save_on_first) for home in (keras.saving, keras.models)),
        (tf.saved_model, "save", _save_on_first),
        (tf.train.Checkpoint, "_write", _save_on_first),
        *((backup, name, _save_on_first) for name in ("_save_model", "on_train_end")),
        *((model, name, steps.set_values) for name in ("load_weights", "set_weights")),
        (tf.data.Dataset, "map", _map_in_order),
        (keras.metrics.Mean, "update_state", steps.update_mean),
        *noise.REPLACED,
        (tf.GradientTape, "gradient", steps.gradient),
        (of_keras, "peek_and_restore", generators.peek),
        (of_keras.GeneratorDataAdapter, "get_tf_dataset", generators.without_prefetch),
        (parallel.DataParallel, "__init__", distribution.make_data_parallel),
        (parallel.ModelParallel, "__init__", distribution.refuse_model_parallel),
    ]
    if scale_batch:
        refuse = functools.partial(scale.refuse, "a call of train_on_batch", "model.fit")
        rows += [(model, "fit", scale.fit), (model, "train_on_batch", refuse)]
    own = {id(value): name for name, value in vars(sys.modules["__main__"]).items()}
    for owner, attribute, new in rows:
        require(owner, attribute, "for automatic mode")
        if name := own.get(id(getattr(owner, attribute))):
            raise RuntimeError(
                f"hvd.auto() changes {attribute}, which the script has imported as {name}. "
                "Call hvd.auto() before that import."
            )
        replace(owner, attribute, new)
    vars(parallel)["distribution_lib"] = distribution


def _begin_and_fit(fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    steps.begin(model)
    return fit(model, *args, **kwargs)


def _map_in_order(to_map: Any, data: Any, map_func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``tf.data.Dataset.map``: calls beside each other draw random numbers in any order."""
    mapped = to_map(data, map_func, *args, **kwargs)
    if kwargs.get("num_parallel_calls", args[0] if args else None) is not None:
        text = str(mapped._map_func.function.graph.as_graph_def())
        if re.search('op: "(Random|StatefulUniform|Multinomial|Assign|Rng|EagerPyFunc)', text):
            return to_map(data, map_func, name=kwargs.get("name"))
    return mapped


def _save_on_first(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace a function that writes a model, which the others wait for."""
    if agree.is_leading.get():
        return save(*args, **kwargs)
    path = next((str(a) for a in (*args, *kwargs.values()) if isinstance(a, str | os.PathLike)), "")
    first, *_ = agree.gather_json("path", path)

    def save_own() -> Any:
        if rank_info.rank() > 0 and path == first:  # else it has a time, or a temporary folder
            return path  # as that of TensorFlow's checkpoints
        with agree.within(agree.is_leading, True):
            return save(*args, **kwargs)

    return agree.on_all_ranks(save.__name__, save_own)


def _refuse_init(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "hvdrun --auto is for scripts of one process, and this one calls hvd.init(). Leave out "
        "--auto: hvdrun -np N train.py."
    )


def _refuse_graphs(disable: Callable[[], None]) -> None:
    raise RuntimeError(division.OWN_LOOP.format(f"in graphs of TensorFlow 1 ({disable.__name__})"))


def _check_exchange() -> None:
    """End the job with an error if variables were trained, and no gradient was exchanged."""
    if not division.own_loops or division.has_exchanged:
        return
    error = division.OWN_LOOP.format("by tf.GradientTape.gradient in a loop")
    print(f"hvd_keras: {error}", file=sys.stderr, flush=True)
    lifecycle.end(error, 2.0)  # seconds, for which it waits for the others
    os._exit(1)
