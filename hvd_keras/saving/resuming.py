"""Lets a restarted ``fit`` go on within an epoch, as if it had not been interrupted.

Callbacks see none of the batches that the model has seen, the metrics have the sums of these, and
Keras's own callbacks have the state that they had.
"""

import collections
import contextlib
import functools
import os
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_keras.gradients import shards
from hvd_keras.gradients.values import is_array
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import Variable, flatten, keras, snapshot
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.saving import per_rank
from hvd_keras.saving.per_rank import ATTRIBUTE, CALLBACK

if TYPE_CHECKING:
    from hvd_keras.training.fit_state import Fit

# What these classes change while ``fit`` runs.
_ATTRIBUTES = {
    "CSVLogger": ("keys",),
    "EarlyStopping": ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch", "_previous_epoch_iterations"),
}


#: Of how many complete fits a checkpoint has the states of random generators, besides the last.
KEPT_RANDOM = 3
_SIZES = "CSVLogger sizes"
_LOGS = "_get_metrics_result_or_logs"
_ENDED = object()  # what data without another batch yield


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of a model's metrics."""
    found = {id(v): v for metric in model.metrics for v in metric.variables}
    return list(found.values())


def metrics_of(model: Any) -> list[Any]:
    """Return a model's metrics, and those of ``compile`` one by one."""
    container: Any = getattr(model, "_compile_metrics", None)
    parts = [one.metrics if one is container else [one] for one in model.metrics]
    return [metric for part in parts for metric in part]


def check_metrics(model: Any, values: list[Any], no_sums: Sequence[str]) -> list[Any]:
    """Return values for a model's metrics; warn and return none if they do not fit.

    ``no_sums``: the classes that have none for another number of ranks.
    """
    if [tuple(v.shape) for v in metric_variables(model)] != [value.shape for value in values]:
        why = "the metrics are not those that the checkpoint has"
    elif no_sums:
        why = (
            "the number of ranks has changed, and the state of "
            f"{', '.join(dict.fromkeys(no_sums))} is not known to be a sum over samples"
        )
    else:
        return values
    warnings.warn(
        f"Checkpoint: {why}, so the metrics of this epoch are those of its remaining batches.",
        stacklevel=5,
    )
    return []


def _stateful(callbacks: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield names, attributes and callbacks of the classes above, alike in each run."""
    counted: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        for name, attributes in _ATTRIBUTES.items():
            if isinstance(callback, getattr(keras.callbacks, name, ())):  # tf_keras lacks some
                counted[name] += 1
                for attribute in attributes:
                    if hasattr(callback, attribute):
                        yield f"{name} {counted[name]} {attribute}", attribute, callback


def numbers_of(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the state of callbacks, as far as JSON can hold it; of a list of arrays its length."""
    found = {name: getattr(c, attribute) for name, attribute, c in _stateful(callbacks)}
    sizes = list(map(_size, _loggers(callbacks)))
    return {**{name: _plain(value) for name, value in found.items()}, _SIZES: {"bytes": sizes}}


class Kept:
    """A value that a callback keeps of a weight, divided between the ranks as that is.

    Args:
        path: of a callback's, ends in the weight's number in the model.
        value: that kept; the weight itself stands for one that ``assign`` will get.
    """

    def __init__(self, path: str, value: Any, weight: Any) -> None:
        self.path, self.value = path, value
        self.dtype, self.shape = value.dtype, tuple(value.shape)
        if (shard := shards.of(weight)) is not None:
            shards.mark(self, shard)

    def assign(self, value: Any) -> None:
        self.value = value


def kept_of(attributes: dict[str, Any], process_set: ProcessSet) -> list[Kept]:
    """Return the values of variables that Keras does not list, if all ranks have them alike."""
    values = {name: snapshot(one) for name, one in attributes.items()}
    mine = {
        name: [list(value.shape), value.dtype.name]
        for name, value in values.items()
        if value.dtype.kind not in "OSU"  # texts
    }
    every = agree.gather_if_different("checkpoint attributes", mine, process_set) or [mine]
    common = [n for n in sorted(mine) if all(theirs.get(n) == mine[n] for theirs in every)]
    if (left_out := sorted(values.keys() - set(common))) and process_set.rank() == 0:
        log.warn_once(
            f"Checkpoint does not save {', '.join(left_out)}: a tf.Variable of texts, or one that "
            "not all ranks have in the same shape and dtype."
        )
    return [Kept(ATTRIBUTE + name, values[name], attributes[name]) for name in common]


def set_attribute(attributes: dict[str, Any], path: str, value: Any) -> None:
    """Give a variable that Keras does not list its value again; warn if it does not exist."""
    name, why = path.removeprefix(ATTRIBUTE), "does not exist yet"
    if (own := attributes.get(name)) is not None:
        try:
            own.assign(value)
            return
        except ValueError:
            why = f"has shape {own.shape}, but {value.shape} there"
    warnings.warn(
        f"Checkpoint does not restore {name}: this variable {why}. Make it by "
        "self.add_weight(..., trainable=False).",
        stacklevel=4,
    )


def arrays_of(callbacks: Sequence[Any], numbers: dict[str, Any], model: Any) -> list[Kept]:
    """Return the arrays that ``numbers`` of the first rank counts; weights if there are none."""
    found = {name: getattr(c, attribute) for name, attribute, c in _stateful(callbacks)}
    kept = []
    for name, length in numbers.items():
        if isinstance(length, list):
            pairs = zip(found.get(name) or model.weights, model.weights, strict=True)
            for i, (value, weight) in enumerate(pairs):
                kept.append(Kept(f"{CALLBACK}{name} {i}", np.asarray(value), weight))
    return kept


def set_state(callbacks: Sequence[Any], numbers: dict[str, Any], arrays: Sequence[Kept]) -> None:
    """Give callbacks a state that ``numbers_of`` and ``arrays_of`` have returned."""
    for name, attribute, callback in _stateful(callbacks):
        value = numbers.get(name)
        if isinstance(value, list):
            value = [a.value for a in arrays if a.path.startswith(f"{CALLBACK}{name} ")] or None
        if isinstance(value, dict):
            value = value["words"]
        if name in numbers:
            setattr(callback, attribute, value)
    for logger, size in zip(_loggers(callbacks), numbers[_SIZES]["bytes"], strict=False):
        _cut(logger, size)


def _loggers(callbacks: Sequence[Any]) -> list[Any]:
    return [one for one in callbacks if isinstance(one, keras.callbacks.CSVLogger)]


def _size(logger: Any) -> int | None:
    """Return the size of a CSVLogger's file; None if this rank writes none."""
    is_written = logger.csv_file is not None and getattr(logger.csv_file, "name", "") != os.devnull
    is_there = is_written and os.path.exists(logger.filename)
    return os.path.getsize(logger.filename) if is_there else None


def _cut(logger: Any, size: int | None) -> None:
    """Remove the rows that a CSVLogger has written after a checkpoint, before a crash."""
    if size is not None and (there := _size(logger)) is not None:
        if size < there:
            os.truncate(logger.filename, size)
        # The file may be new: without append, or because somebody has removed the old one.
        logger.append_header = min(size, there) == 0


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        is_text = any(isinstance(one, str) for one in value)
        return {"words": value} if is_text else [len(value)]
    return value if value is None or isinstance(value, int) else float(value)


def tell_what_is_read_again(fit: "Fit", save_freq: str | int) -> None:
    """Warn, on the first rank, if a restart reads data that the model has seen."""
    is_sought = fit.seekable is not None and not any(one.source.reads for one in fit.passes)
    is_within = save_freq != "epoch" or any(one.goes_on for one in fit.passes)
    if fit.process_set.rank() or is_sought or not (fit.begins_anew or is_within):
        return
    log.logger.warning(
        "Checkpoint: a restart %s. Data of hvd.data.shard begin anywhere if made of arrays, a "
        "PyDataset or hvd.data.files. With save_freq='epoch' and whole passes as epochs "
        "nothing is read twice.",
        "will begin the data anew: its passes end within the epochs of fit"
        if fit.begins_anew
        else "within a pass over the data will read what is before that again, without "
        "training on it",
    )


def compared_by(fit: "Fit") -> set[int]:
    """Return the ids of the weights that are equal on all ranks, or ``fit`` says that not."""
    if fit.values is None or fit.values.reported:
        return set()
    return {*map(id, fit.values.variables)} & {*map(id, fit.model.trainable_variables)}


class Resuming:
    """Passes over the batches of an epoch that the model has seen, for this ``fit``.

    It reads them, unless the data begin behind them.

    What other callbacks do when the epoch begins is undone in the model: the epoch began before.

    Args:
        fit: whose epoch goes on.
        own: the variables of the training, as restored, also those that Keras does not list.
        batches: how many the model has seen.
        reads: whether the data begin before them.
        metrics: the values of the metrics' variables; none if they cannot be restored.
    """

    def __init__(
        self, fit: "Fit", own: list[Any], batches: int, reads: bool, metrics: Sequence[Any]
    ) -> None:
        self.batches, self.passed = batches, 0
        self._model, self._reads, self._metrics = fit.model, reads, metrics
        # A copy of the tables might not fit.
        parts = {id(v) for v in own if (shard := shards.of(v)) is not None and shard.owned is None}
        self._own = [v for v in own if id(v) not in parts]
        self._values = [np.asarray(variable).copy() for variable in self._own]
        self._random = per_rank.random_state()
        self._iterator = fit.iterator
        # Keras 3.6 has the second one alone.
        names = "_enumerate_iterator", "enumerate_epoch"
        self._name = next(name for name in names if hasattr(self._iterator, name))
        self._enumerate = getattr(self._iterator, self._name)
        vars(self._iterator)[self._name] = self._rest

    def _rest(self) -> Iterator[Any]:
        del vars(self._iterator)[self._name]  # later epochs are whole
        at_once = self._model.steps_per_execution
        for found in self._enumerate():
            if self.passed >= self.batches:
                yield found
                continue
            # A list has batches that are read already, on PyTorch.
            if self._reads and not isinstance(found[-1], list):
                if next(found[-1], _ENDED) is _ENDED:
                    return
                for _ in range(1, at_once):
                    next(found[-1], _ENDED)
            self.passed += at_once

    def put_back(self) -> None:
        """Undo what callbacks have done when the epoch began, and what resets the metrics."""
        for variable, value in zip(self._own, self._values, strict=True):
            variable.assign(value)
        per_rank.set_random_state(self._random)
        if self._metrics:
            pairs = zip(metric_variables(self._model), self._metrics, strict=True)
            for variable, value in pairs:
                variable.assign(value)
            vars(self._model)[_LOGS] = functools.partial(_logs, self._model)


def _logs(model: Any, of_last_step: Any) -> Any:
    # Keras takes the epoch's logs from its last step. If none was left, the metrics have them.
    del vars(model)[_LOGS]
    return getattr(model, _LOGS)(of_last_step or model.get_metrics_result())


def restore_passes(every: Sequence[Any], states: Sequence[list[int]]) -> None:
    """Let data continue where they were, if they are of as many sources."""
    if len(states) == len(every):
        for passes, state_then in zip(every, states, strict=True):
            passes.restore(state_then)


def random_of_ranks(every: Sequence[Any], process_set: ProcessSet) -> dict[str, Any]:
    """Return what metadata have of the generators' states and seeds at several times."""
    states, seeds = map(list, zip(*every, strict=True))
    # 13 KB each, and mostly equal: then a hash of each travels, and those of one rank are written.
    gathered = agree.gather_if_different("checkpoint random states", states, process_set)
    of_ranks = agree.gather_json("checkpoint seeds", seeds, process_set)
    return {"random": gathered or [states], "seeds": of_ranks}


def random_of_rank(found: per_rank.Found, number: int, process_set: ProcessSet) -> Any:
    """Return this rank's, ``number`` from the end (-1: the newest); None if they were not kept."""
    if found.metadata["ranks"] != process_set.size() or -number > len(found.metadata["random"][0]):
        return None
    states, seeds = found.metadata["random"], found.metadata["seeds"]
    return states[process_set.rank() % len(states)][number], seeds[process_set.rank()][number]


def rows_of_step(fit: "Fit") -> int | None:
    """The rows of a step of all ranks, if they are known; all ranks must call it."""
    mine = int(fit.arguments["batch_size"] or 32)  # ranks may have different ones
    gathered = agree.gather_json("rows of a step", mine, fit.process_set)
    if fit.passes:
        return int(fit.passes[0].source.global_batch)
    return sum(gathered) if is_array(flatten(fit.arguments["x"])[0]) else None


def rate_of(optimizer: Any) -> float | None:
    """Return an optimizer's learning rate; None if it is a schedule or does not exist."""
    try:
        rate = optimizer.learning_rate
    except AttributeError:  # a MultiOptimizer has none of its own
        return None
    return float(rate) if isinstance(rate, Variable) else None


_LENGTHS = ("boundaries", "decay_steps", "first_decay_steps", "warmup_steps")


def length_of(optimizer: Any) -> float | None:
    """Return how many steps a schedule of learning rates has; None without one that says so."""
    rate = getattr(optimizer, "_learning_rate", None)
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return None
    with contextlib.suppress(NotImplementedError):  # one of the user's
        config = rate.get_config()
        return max(map(float, flatten([config.get(name, 0.0) for name in _LENGTHS]))) or None
    return None


def let_schedules_go_on(
    optimizers: Sequence[Any], lengths: Sequence[float | None], then: int, now: int
) -> None:
    """Count optimizers' steps in those of now where the script counts those of schedules so, too.

    Args:
        optimizers: all of a model.
        lengths: what ``length_of`` returned for each when the checkpoint was written.
        then, now: the rows of a step.
    """
    for optimizer, length in zip(optimizers, lengths, strict=False):
        if length and length_of(optimizer) not in (None, length):
            seen, every = int(optimizer._iterations), optimizer.gradient_accumulation_steps or 1
            steps = seen * then // now
            # As many are left to the next update, for the sums of gradients are those of then.
            optimizer._iterations.assign(max(steps - (steps - seen) % every, seen % every))


def batches_seen(
    found: per_rank.Found, then: int, now: int, calls: int, process_set: ProcessSet
) -> int:
    """Return how many batches of now have as many rows of the epoch, to whole calls of the step."""
    batch, ranks = found.metadata["batch"], found.metadata["ranks"]
    batches = batch * then // now // calls * calls
    again = batch * then - batches * now
    if again and process_set.rank() == 0:
        warnings.warn(
            f"Checkpoint: {found.path} was written by {ranks} ranks after batch {batch} of epoch "
            f"{found.metadata['epoch']}; now there are {process_set.size()} ranks, or other "
            f"batches. {batches} batches are skipped, and {again / now:.0%} of one are used again.",
            stacklevel=4,
        )
    return int(batches)


def message(
    found: per_rank.Found,
    epochs: int,
    batch: int,
    is_complete: bool,
    has_stopped: bool,
    is_restored: bool,
) -> str:
    """Say with what a fit begins that has found a checkpoint; ``batch``: how many it skips."""
    epoch = found.metadata["epoch"]
    name = pathlib.Path(found.path).stem
    if has_stopped:
        return (
            f"{name} is the end of a fit that a callback stopped after epoch {epoch}, so nothing "
            "is left to train. To train again, change epochs, or use Checkpoint(…, restore=False)"
        )
    if is_complete:
        return (
            f"{name} was written in a later fit, so this one is not repeated; code after it sees "
            + ("the weights of that one" if is_restored else "weights that are not trained")
        )
    if epoch >= epochs:
        return (
            f"{name} is the end of epoch {epoch}, and fit ends after epoch {epochs}, so nothing is "
            "left to train. To train again, use Checkpoint(…, restore=False)"
        )
    place = f"epoch {epoch + 1} of {epochs}" + f", batch {batch + 1}" * (batch > 0)
    return f"continuing from {name}, {place}"
