"""Turns automatic mode on: seeds, patches of Keras, output and files on the first rank alone."""

import atexit
import functools
import importlib
import inspect
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
from hvd_keras.automatic import distribution, noise, scale, steps, writes
from hvd_keras.gradients import division
from hvd_keras.hooks import broadcasting, variables
from hvd_keras.runtime import agree, rank_info, settings
from hvd_keras.runtime.keras import is_legacy, require
from hvd_keras.runtime.process_sets import global_process_set


def auto(scale_batch: bool = False) -> None:
    """Let all ranks do the work of this script of one process together.

    To be called as a script's first line; ``hvdrun --auto`` does so. Every rank runs the whole
    script, and computes its part of each batch in ``fit``, ``train_on_batch``, ``evaluate``,
    ``test_on_batch`` and ``predict``. Batch size and learning rate stay what they are, and so do,
    to rounding, the results. The first rank alone prints to stdout, and saves models. See
    docs/auto.md.

    Args:
        scale_batch: train by another recipe, as ``hvdrun --auto --scale-batch``: ``fit`` makes
            batches ``size()`` times larger, with a rate as much larger, and a warm-up. It prints
            what it changes; the results differ from those of one process.

    Raises:
        RuntimeError: the script calls ``hvd.init()``, too; or Keras is ``tf_keras``.
    """
    if division.is_on:
        return
    if rank_info.is_initialized():
        raise RuntimeError(_CALLS_HVD)
    if is_legacy:
        raise RuntimeError(
            "hvdrun --auto needs Keras 3, and TF_USE_LEGACY_KERAS is set. Unset it, or add "
            "hvd_keras's lines to the script, see docs/guide.md, and leave --auto out."
        )
    settings.be_strict()
    sys.excepthook = _tell_briefly(sys.excepthook)
    lifecycle.init()
    hvd_keras.init = _refuse_init
    if rank_info.size() == 1:
        return
    division.is_on = True
    _seed()
    _patch(scale_batch)
    atexit.register(_check_exchange)
    if rank_info.rank() > 0:
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The first rank's are enough, but for errors.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        writes.watch()


def prepare(model: Any) -> Any:
    """Let all ranks train a model together, in a script of one process; see ``hvd.auto``.

    Args:
        model: a ``keras.Model``; if it is built, all ranks get the first rank's weights.

    Returns:
        The same model.

    Raises:
        RuntimeError: as ``hvd.auto``.
    """
    auto()
    if division.is_on:
        steps.begin(model)
    return model


def _tell_briefly(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``sys.excepthook``: of what is refused, show the line of the script, not all calls."""
    packages = os.path.dirname(os.path.dirname(str(keras.__file__)))
    libraries = packages, *(os.path.dirname(str(home.__file__)) for home in (hvd_keras, runpy)), "<"

    def tell(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if division.is_on and rank_info.rank() > 0:
            sys.stderr = sys.__stderr__
        found = re.search("hvdrun --auto.*", str(value))
        if found is None or settings.read().all_tracebacks:
            hook(kind, value, trace)
            return
        for frame in reversed(traceback.extract_tb(trace)):
            if not frame.filename.startswith(libraries):
                print(
                    f'File "{frame.filename}", line {frame.lineno}, {frame.line}', file=sys.stderr
                )
                break
        print(f"{kind.__name__}: {found[0]}", file=sys.stderr)

    return tell


# For which a rank that fails at its end waits for the others.
_SECONDS = 2.0

_CALLS_HVD = (
    "hvdrun --auto is for scripts of one process, and this one calls hvd.init(). Leave out --auto: "
    "hvdrun -np N train.py."
)


def _refuse_init(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(_CALLS_HVD)


def _seed() -> None:
    """Give all ranks the first one's seeds, so that unseeded random numbers are equal."""
    (seed, *_) = agree.gather_json("seed", secrets.randbelow(2**31))
    keras.utils.set_random_seed(seed)
    generator = random.Random(seed)
    default_rng = np.random.default_rng

    @functools.wraps(default_rng)
    def seeded(seed: Any = None) -> Any:
        return default_rng(generator.randrange(2**63) if seed is None else seed)

    np.random.default_rng = seeded


def _patch(scale_batch: bool) -> None:
    model, backup = keras.Model, keras.callbacks.BackupAndRestore
    # Its functions call a module of the backend, by this name.
    parallel = importlib.import_module("keras.src.distribution.distribution_lib")
    generators = importlib.import_module("keras.src.trainers.data_adapters.generator_data_adapter")
    rows: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (model, "fit", _begin_first),
        *((model, f"make_{kind}_function", steps.wrap_make(kind)) for kind in steps.METHODS),
        *((model, name, _on_first) for name in ("save", "save_weights", "export")),
        *((home, "save_model", _on_first) for home in (keras.saving, keras.models)),
        *((backup, name, _on_first) for name in ("_save_model", "on_train_end")),
        (backup, "on_train_begin", _restore_from_first),
        *((model, name, steps.wrap_set) for name in ("load_weights", "set_weights")),
        (tf.data.Dataset, "map", _in_order),
        (keras.metrics.Mean, "update_state", steps.wrap_mean),
        *noise.patches(),
        (tf.GradientTape, "gradient", steps.wrap_gradient),
        (generators.GeneratorDataAdapter, "get_tf_dataset", _without_prefetch),
        (parallel, "distribution_lib", lambda of_tensorflow: distribution.Devices),
        (parallel.DataParallel, "__init__", distribution.wrap_data_parallel),
        (parallel.ModelParallel, "__init__", distribution.refuse_model_parallel),
        *(
            (tf.compat.v1, name, _refuse_v1)
            for name in ("disable_eager_execution", "disable_v2_behavior")
        ),
    ]
    if scale_batch:
        rows += [(model, "fit", scale.wrap_fit), (model, "train_on_batch", scale.refuse_batch)]
    own = {id(value): name for name, value in vars(sys.modules["__main__"]).items()}
    for owner, attribute, wrap in rows:
        require(owner, attribute, "for automatic mode")
        old = getattr(owner, attribute)
        if id(old) in own:
            raise RuntimeError(
                f"hvd.auto() changes {attribute}, which the script has imported as {own[id(old)]}. "
                "Call hvd.auto() before that import."
            )
        setattr(owner, attribute, wrap(old))


def _begin_first(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def fit_divided(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.begin(self)
        return fit(self, *args, **kwargs)

    return fit_divided


def _in_order(to_map: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``tf.data.Dataset.map``: calls beside each other draw random numbers in any order."""

    @functools.wraps(to_map)
    def in_order(self: Any, map_func: Any, *args: Any, **kwargs: Any) -> Any:
        mapped = to_map(self, map_func, *args, **kwargs)
        if kwargs.get("num_parallel_calls", args[0] if args else None) is not None:
            text = str(mapped._map_func.function.graph.as_graph_def())
            if re.search('op: "(Random|StatefulUniform|Multinomial|Assign|Rng|EagerPyFunc)', text):
                return to_map(self, map_func, name=kwargs.get("name"))
        return mapped

    return in_order


def _without_prefetch(get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes a dataset of a generator, of which each rank must read as much."""

    @functools.wraps(get)
    def get_plain(self: Any) -> Any:
        # When validation ends, what was read ahead is lost: it differs by rank, and in each run.
        (dataset,) = get(self)._inputs()
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        return dataset.with_options(options)

    return get_plain


def _on_first(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that writes a model, which the others wait for."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_once(*args: Any, **kwargs: Any) -> Any:
        if agree.is_leading.get():
            return save(*args, **kwargs)
        path = signature.bind(*args, **kwargs).arguments.get("filepath")
        first, *_ = agree.gather_json("path", str(path))

        def save_unless_saved() -> Any:
            if rank_info.rank() > 0 and str(path) != first:  # it has a time, or a temporary folder
                with agree.within(agree.is_leading, True):
                    return save(*args, **kwargs)
            return None

        agree.on_leader(save.__name__, lambda: save(*args, **kwargs), global_process_set)
        agree.on_all_ranks(save.__name__, save_unless_saved)

    return save_once


def _restore_from_first(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``BackupAndRestore.on_train_begin``."""

    @functools.wraps(begin)
    def restore(self: Any, logs: Any = None) -> None:
        agree.on_leader("BackupAndRestore", lambda: begin(self, logs), global_process_set)
        self.model._initial_epoch, *_ = agree.gather_json("epoch", self.model._initial_epoch)
        broadcasting.broadcast_variables(variables.of_training(self.model), 0)

    return restore


def _refuse_v1(disable: Callable[[], None]) -> Callable[[], None]:
    def refuse() -> None:
        raise RuntimeError(
            division.OWN_LOOP.format(f"in graphs of TensorFlow 1 ({disable.__name__})")
        )

    return refuse


def _check_exchange() -> None:
    """End the job with an error if variables were trained, and no gradient was exchanged."""
    if not division.own_loops or division.has_exchanged:
        return
    error = division.OWN_LOOP.format("by tf.GradientTape.gradient in a loop")
    print(f"hvd_keras: {error}", file=sys.stderr, flush=True)
    lifecycle.end(error, _SECONDS)
    os._exit(1)
