"""What ``init`` changes in Keras on PyTorch, and ``training.fit_state.Backend`` there."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hvd_keras.data.sources import Passes
from hvd_keras.gradients import missing_calls
from hvd_keras.gradients.model_ranks import process_set_of, reducer_of, reducer_within, reducers_of
from hvd_keras.patches import patched_fit
from hvd_keras.runtime import agree, rank_info
from hvd_keras.runtime.keras import replace, require
from hvd_keras.runtime.reductions import Average
from hvd_keras.saving import storage
from hvd_keras.torch import data, losses
from hvd_keras.torch.losses import weighed
from hvd_keras.torch.optimizer import note_gradients
from hvd_keras.training import sampled_rows
from hvd_keras.training.fit_state import Backend, Fit, running


@functools.cache
def install(backend: Backend) -> None:
    """Replace what is needed; ``backend`` is this module. RuntimeError if Keras lacks any of it."""
    model, optimizers = keras.Model, keras.optimizers
    evaluate = functools.partial(patched_fit.evaluate, backend)
    save = functools.partial(storage.save, False)
    rows: list[tuple[Any, str, Callable[..., Any]]] = [
        (model, "fit", functools.partial(patched_fit.fit, backend)),
        (model, "evaluate", evaluate),
        (model, "predict", evaluate),
        (model, "train_on_batch", _train_on_batch),
        (model, "train_step", _train_step),
        (model, "_symbolic_build", _build),
        *((owner, name, save) for owner, name in storage.writers()),
        (keras.callbacks.ProgbarLogger, "set_params", patched_fit.set_params),
        (optimizers.Optimizer, "apply", missing_calls.apply),
        (optimizers.LossScaleOptimizer, "apply", _apply_scaled),
        (optimizers.LossScaleOptimizer, "check_finite", _check_finite),
        (torch.autograd, "grad", note_gradients),
        (keras.losses.Loss, "__call__", losses.call),
        (keras.metrics.MeanMetricWrapper, "update_state", losses.update),
    ]
    for owner, attribute, new in rows:
        require(owner, attribute, "to train on several ranks")
        replace(owner, attribute, new)
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    every = [one for group in optimizer.param_groups for one in group["params"]]
    # Others, such as an adversarial example, may be of this rank.
    shared = [one for one in every if one.grad is not None and isinstance(one, torch.nn.Parameter)]
    of_torch = torch.distributed  # whose DistributedDataParallel averages gradients itself
    if shared and not (of_torch.is_available() and of_torch.is_initialized()):
        missing_calls.check_update(optimizer, [one.grad for one in shared], shared)


def _apply_scaled(
    apply: Callable[..., Any], scaled: Any, grads: Any, trainable_variables: Any = None
) -> None:
    reducer: Any = reducer_of(scaled)
    # Accumulated gradients are exchanged once per update.
    if reducer is not None and not scaled.inner_optimizer.gradient_accumulation_steps:
        reducer.apply(functools.partial(apply, scaled), grads, trainable_variables)
    else:
        apply(scaled, grads, trainable_variables)


def _check_finite(local_check: Callable[..., Any], scaled: Any, grads: Any) -> Any:
    """All ranks skip a step, or none, also where they accumulate gradients."""
    finite, reducer = local_check(scaled, grads), reducer_within(scaled)
    is_exchanged = reducer_of(scaled) and not scaled.inner_optimizer.gradient_accumulation_steps
    if reducer is None or reducer.process_set.size() == 1 or is_exchanged:
        return finite
    call: dict[str, Any] = {"process_set": reducer.process_set.id(), "reduction": "Min"}
    (everywhere,) = agree.run("allreduce", [np.array([bool(finite)])], name="all finite", **call)
    return torch.tensor(bool(everywhere[0]))


def _build(
    of_keras: Callable[..., Any], model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    with agree.within(agree.is_building, True):
        of_keras(model, iterator=iterator, data_batch=data_batch)
    if iterator is not None:
        own = running(model)
        source = own and own.arguments["x"]
        patched_fit.before_callbacks(model, source, iterator.num_batches, iterator)


def _train_step(step: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    reducer: Any = reducer_of(model.optimizer)
    if reducer is None:
        return step(model, *args, **kwargs)
    reducer.is_stepping = True
    try:
        return step(model, *args, **kwargs)
    finally:
        reducer.is_stepping = False


def _train_on_batch(train: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    process_set = process_set_of(model) if rank_info.is_initialized() else None
    if process_set is None or process_set.size() == 1:
        return train(model, *args, **kwargs)
    averages = all(reducer.op is Average for reducer in reducers_of(model))
    with weighed(model, process_set, averages, "train_step"):
        return train(model, *args, **kwargs)


class Seed:
    """The seed of torch's own generator, as ``hooks.variables`` handles states."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array([torch.initial_seed()], np.uint64)

    def assign(self, state: Any) -> None:
        """Seed it anew."""
        torch.manual_seed(int(state[0]))


def rows_in_steps(source: Any) -> Any:
    """Return what is equal if all ranks have equally many rows in each step; None: unknown."""
    return "shards" if hasattr(source, "passes") else None


def nothing(*_: Any, **__: Any) -> Any:
    """Stand for what is done, or is there, on TensorFlow alone."""


check = synchronize = weigh_classes = validate_together = nothing
repeats = repeated = build_step = build_metrics = logs_by_steps = nothing


def passes_of(source: Any) -> list[Passes]:
    """Return the passes over data of ``hvd.data.shard``."""
    return [source.passes] if hasattr(source, "passes") else []


def prepare(own: Fit, source: Any) -> None:
    """Find the passes over the data; Keras has created the variables."""
    passes, steps = passes_of(source), own.arguments["steps_per_epoch"]
    # Keras begins the data anew in each epoch, or when they end.
    own.begins_anew = bool(passes) and steps is not None and steps != len(source)
    own.passes = () if own.begins_anew else passes
    own.seekable = source if passes and hasattr(source, "seek") and steps is None else None
    wrapped, several = keras.layers.TorchModuleWrapper, own.process_set.size() > 1
    is_plain = type(source) is DataLoader and data.shuffles_all(source) is not None
    if several and steps is None and is_plain:
        read = functools.partial(data.samples, source)
        own.source = sampled_rows.described(len(source.dataset), read)
    modules = [one.module for one in own.model._flatten_layers() if isinstance(one, wrapped)]
    buffers = [name for module in modules for name, _ in module.named_buffers()]
    if several and any(name.endswith("running_mean") for name in buffers):
        missing_calls.tell(
            f"each rank has its own buffers of torch modules ({', '.join(buffers)}): nothing "
            "broadcasts or averages them, and Checkpoint does not keep them. Use "
            "keras.layers.BatchNormalization.",
            own.process_set,
        )


def can_look_at(source: Any) -> bool:
    """Whether ``pass_first_batch`` can pass the batches of a source."""
    return True


def pass_first_batch(model: Any, look: Callable[[Any], None]) -> None:
    """Let a function see the batch that the next step gets."""
    train_function = model.train_function

    def with_a_look(data: Any) -> Any:
        model.train_function = train_function  # for all later steps
        look(keras.tree.map_structure(lambda part: getattr(part, "cpu", lambda: part)(), data[0]))
        return train_function(data)

    model.train_function = with_a_look


def gpu_bytes() -> int | None:
    """Return how much memory of its GPU is in use; None without a GPU."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_initialized() else (0, 0)
    return total - free or None
