"""Adapts the callbacks of a ``fit`` to several ranks that train one model.

Keras's callbacks that write files do so on the first rank of the process set only. Those that
decide something decide alike on all ranks: if one rank stopped alone, the others would wait for its
gradients. The list of callbacks is edited; the classes stay as they are.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvd_keras.data.sources import Passes
from hvd_keras.gradients import model_ranks, shards
from hvd_keras.gradients.values import Values, check_rows, row_hashes
from hvd_keras.runtime import agree, log, settings
from hvd_keras.runtime.keras import keras, replaced, snapshot, summary
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.training import metric_states, rounds, variables
from hvd_keras.training.fit_state import Fit

_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("CSVLogger", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)  # tf_keras has no OrbaxCheckpoint
)
_DECIDERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
_CHECKPOINT = keras.callbacks.ModelCheckpoint


def averages(callbacks: Sequence[Any]) -> bool:
    """Whether the ranks average their metrics."""
    return any(getattr(callback, "_hvd_averages", False) for callback in callbacks)


def describe(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return what the other ranks must know of this rank's callbacks."""
    parts, terminate = _parts(callbacks), keras.callbacks.TerminateOnNaN
    return {
        "monitored": [[c.monitor for c in part if isinstance(c, _DECIDERS)] for part in parts],
        "ends on NaN": [any(isinstance(c, terminate) for c in part) for part in parts],
        "checkpoints": [
            [c.save_freq, c.save_best_only] for c in callbacks if isinstance(c, _CHECKPOINT)
        ],
        "callbacks": [type(callback).__name__ for callback in callbacks],
        # A derived class waits where the one of hvd_keras does.
        "communicate": sorted(
            next(cls.__name__ for cls in type(c).__mro__ if "_hvd_communicates" in vars(cls))
            for c in callbacks
            if hasattr(type(c), "_hvd_communicates")  # not one that passes attributes on
        ),
    }


def check_communicating(gathered: Sequence[dict[str, Any]], process_set: ProcessSet) -> None:
    """Raise ValueError, on all ranks, if a callback would wait for one that a rank does not have.

    ``gathered``: what ``describe`` returned on all ranks.
    """
    by_rank = [theirs["communicate"] for theirs in gathered]
    if any(theirs != by_rank[0] for theirs in by_rank):
        shown = [", ".join(theirs) or "none" for theirs in by_rank]
        raise ValueError(
            "fit got different callbacks that exchange values between the ranks: "
            f"{agree.by_rank(shown, process_set)}. Pass each of these to fit on all ranks, not in "
            "an `if hvd.rank() == 0:`."
        )


def _parts(callbacks: Sequence[Any]) -> list[list[Any]]:
    """Divide callbacks before each that averages metrics, for which it needs this rank's logs."""
    parts: list[list[Any]] = [[]]
    for callback in callbacks:
        if averages([callback]):
            parts.append([])
        parts[-1].append(callback)
    return parts


def edited(common: Fit, callbacks: Sequence[Any]) -> list[Any]:
    """Return callbacks of this rank, with those that make ranks decide alike between them."""
    found: list[Any] = []
    deciders = (*_DECIDERS, keras.callbacks.TerminateOnNaN)
    for number, part in enumerate(_parts(callbacks)):
        places = [i for i, callback in enumerate(part) if isinstance(callback, deciders)]
        places = places or [len(part)]  # for deciders of other ranks
        agreeing = _Agree(common, number)
        put_back = keras.callbacks.LambdaCallback(
            on_train_batch_end=agreeing.put_back, on_epoch_end=agreeing.put_back
        )
        put_back._supports_tf_logs = True
        part.insert(places[-1] + 1, put_back)
        part.insert(places[0], agreeing)
        found += part
    sync = rounds.Sync(common) if model_ranks.rounds_of(common.model) else None
    return [*([sync] if sync else []), *found, _AtTheEnd(common, sync)]


@contextlib.contextmanager
def stops_told(common: Fit) -> Iterator[None]:
    """Say, if ``fit`` fails, that this rank has left an epoch, in which the others may go on."""
    try:
        yield
    except Exception as error:
        # That ranks wait for different things, whose error cannot say why.
        if common.stopped and "have different numbers of batches" in str(error):
            log.logger.error("%s: let all ranks stop in the same batch", common.stopped)
        raise


@contextlib.contextmanager
def on_leader_alone(
    callbacks: Sequence[Any], process_set: ProcessSet, common: Fit | None = None
) -> Iterator[None]:
    """Silence the callbacks that write files or print, except on the first rank.

    In the ``fit`` that ``common`` is, ``ModelCheckpoint`` writes there, and the others wait for it.
    """
    # What a class that derives from one of Keras's adds to it runs on all ranks. An instance keeps
    # its state and its own methods; only the hooks of Keras's class are empty.
    with contextlib.ExitStack() as stack:
        for callback in {id(callback): callback for callback in callbacks}.values():
            cls: Any = type(callback)
            if isinstance(callback, _WRITERS) and process_set.rank() != 0:
                stack.callback(setattr, callback, "__class__", cls)
                callback.__class__ = _silent(cls)
            prints = cls.__module__.startswith("keras.") and getattr(callback, "verbose", 0)
            if prints and process_set.rank() != 0 and not settings.read().verbose_all:
                stack.enter_context(replaced(callback, "verbose", 0))
            if isinstance(callback, _CHECKPOINT) and common is not None:
                save = functools.partial(_save, common, callback, callback._save_model)
                stack.enter_context(replaced(callback, "_save_model", save))
        yield


def _save(common: Fit, callback: Any, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replace ``ModelCheckpoint._save_model``: all ranks wait until it is written, or raise."""
    if common.waits_for_checkpoints:
        sums = [(one, snapshot(one)) for one in variables.accumulators(common.model)]
        if not model_ranks.rounds_of(common.model):  # where each rank has its own
            variables.average_accumulated(common.model, common.process_set)
        try:
            agree.on_leader("ModelCheckpoint", lambda: save(*args, **kwargs), common.process_set)
        finally:
            for one, mine in sums:
                one.assign(mine)
        if callback.save_best_only:  # a script reads it on any rank
            mine = None if callback.best is None else float(callback.best)
            callback.best = agree.gather_json("ModelCheckpoint.best", mine, common.process_set)[0]
    elif common.process_set.rank() == 0:
        save(*args, **kwargs)


def refuse(callbacks: Sequence[Any], model: Any, process_set: ProcessSet) -> None:
    """Raise ValueError if a callback cannot work with several ranks."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "keras.callbacks.BackupAndRestore restores each process separately, but this model "
                f"trains on {process_set.size()}: a rank that finds another state, or none, would "
                f"differ from the rest. Use hvd.callbacks.Checkpoint({str(callback.backup_dir)!r})"
                ", which writes on one rank and restores all."
            )
        orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
        slots = getattr(model.optimizer, "variables", ())  # in older optimizers a method
        if isinstance(callback, orbax):
            shards.refuse_parts([*model.variables, *slots])
        saves = isinstance(callback, (_CHECKPOINT, orbax))
        if saves and callback.save_freq != "epoch" and model_ranks.rounds_of(model):
            raise ValueError(
                f"{type(callback).__name__}: save_freq={callback.save_freq} would save weights of "
                "one rank, because the optimizer has sync_every: the ranks have common weights at "
                'the end of an epoch. Use save_freq="epoch", or hvd.callbacks.Checkpoint, which '
                "saves those of all ranks."
            )
        swap = getattr(keras.callbacks, "SwapEMAWeights", ())  # which tf_keras does not have
        if isinstance(callback, swap) and model_ranks.is_sharded(model.optimizer):
            raise ValueError(
                "keras.callbacks.SwapEMAWeights needs all moving averages, but each rank has a "
                "share of them: leave shard_state=True out of hvd.DistributedOptimizer, or the "
                "callback."
            )


@functools.cache
def _silent(cls: Any) -> Any:
    """Return a class of which the hooks that it has from Keras's writer do nothing."""
    writer = next(base for base in cls.__mro__ if base in _WRITERS)

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def set_model(self: Any, model: Any) -> None:
        with replaced(self, "write_graph", False), replaced(self, "embeddings_freq", 0):
            writer.set_model(self, model)

    def on_train_begin(self: Any, logs: Any = None) -> None:
        self.csv_file = open(os.devnull, "w")  # noqa: SIM115 - on_train_end closes it
        self.writer = self.keys = None

    changed: dict[str, Any] = {name: nothing for name in vars(writer) if name.startswith("on_")}
    # What derived classes use is there, and writes nothing.
    if writer is keras.callbacks.TensorBoard:
        for name in ("_train_writer", "_val_writer"):
            changed[name] = property(lambda self: summary.create_noop_writer())
        changed["set_model"] = set_model
    elif writer is keras.callbacks.CSVLogger:
        changed = {"on_train_begin": on_train_begin}
    else:
        changed["set_model"] = keras.callbacks.Callback.set_model
    silent = type(writer.__name__, (writer,), changed)
    return silent if cls is writer else type(cls.__name__, (cls, silent), {})


class CountSteps(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps that ``fit`` reads of repeated data."""

    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self._passes = passes

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._passes.read += int(getattr(self.model, "steps_per_execution", None) or 1)


class CountRows(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets the last step of a pass over padded rows count by its real rows in an epoch's logs.

    There, real rows have larger weights, so that gradients are those of all real rows. What that
    step adds to the sums that metrics keep is divided by this factor.

    Args:
        passes: over the rows.
        by_steps: Keras lets each step count alike in the losses of outputs.
    """

    _supports_tf_logs = True
    _before: Sequence[Any] = ()  # the last step: metrics, their variables and values

    def __init__(self, passes: Passes, by_steps: bool) -> None:
        super().__init__()
        self._passes, self._by_steps = passes, by_steps

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = self._passes.source.steps
        if self._passes.share_of_last_step() == 1 or not batch + 1 == steps == self.params["steps"]:
            return
        of_outputs = getattr(getattr(self.model, "_compile_loss", None), "metrics", ())
        of_outputs = of_outputs if self._by_steps else ()
        every = [one for m in self.model.metrics for one in getattr(m, "metrics", None) or [m]]
        sums = {id(one): one for one in every if metric_states.is_summable(one)}.values()
        self._before = [
            (one, [(v, snapshot(v)) for v in one.variables if "float" in str(v.dtype)])
            for one in sums
            if not any(one is other for other in of_outputs)
        ]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        share = self._passes.share_of_last_step() if self._before else 1.0
        for metric, before in self._before:
            counts = [snapshot(v) - old for v, old in before if v is getattr(metric, "count", None)]
            # One that a step of one's own updates once counts steps, not rows.
            if self._passes.source.batch_size == 1 or not any(np.all(one == 1) for one in counts):
                for variable, old in before:
                    variable.assign(old + (snapshot(variable) - old) * share)
        self._before = ()


class _Internal(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that ``fit`` adds."""

    _supports_tf_logs = True  # tf_keras passes the logs themselves, so that others see changes

    def __init__(self, common: Fit) -> None:
        super().__init__()
        self.common = common


class _Agree(_Internal):
    """Gives the callbacks behind it, which decide by values of the logs, the same ones."""

    def __init__(self, common: Fit, number: int) -> None:
        super().__init__(common)
        self._number = number  # of the part of the callbacks
        self.own: dict[str, Any] = {}  # what this rank has logged

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Make a NaN of one rank one of all."""
        if not self.common.ends_on_nan[self._number] or model_ranks.rounds_of(self.model):
            return  # in rounds, a rank that stops lets the others stop
        logs = {} if logs is None else logs
        mine = np.array([float(logs.get("loss") or 0.0)])
        call: dict[str, Any] = {"process_set": self.common.process_set.id(), "reduction": "Average"}
        # The mean is finite only if all values are.
        ((mean,),) = agree.run("allreduce", [mine], name="TerminateOnNaN.loss", **call)
        if not np.isfinite(mean):
            # For the deciders alone; put_back restores what this rank has logged.
            self.own = {"loss": logs.get("loss")}
            logs["loss"] = float(mean)
            # A TerminateOnNaN of this rank stops it with a message, as it sees the logs next.
            if not describe(self.common.callbacks)["ends on NaN"][self._number]:
                self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace values that differ by their mean over the ranks; ValueError for an array."""
        self.own = {}
        if not (names := self.common.monitored[self._number]):
            return
        logs = {} if logs is None else logs
        values = {name: logs.get(name) for name in names}
        # Keras logs F1Score of one class as an array of one number.
        mine = {
            k: None if v is None else np.asarray(v, "float64").squeeze().tolist()
            for k, v in values.items()
        }
        gathered = agree.gather_json("monitored", mine, self.common.process_set)
        for name, value in mine.items():
            known = [theirs[name] for theirs in gathered if theirs[name] is not None]
            if any(isinstance(theirs, list) for theirs in known):
                raise ValueError(
                    f"EarlyStopping and ReduceLROnPlateau decide by one number, but {name!r} is an "
                    "array. Monitor another metric, or average it, as F1Score(average='macro')."
                )
            if known and any(theirs[name] != value for theirs in gathered):
                self.own[name] = logs.get(name)
                logs[name] = sum(known) / len(known)

    def put_back(self, number: int, logs: dict[str, Any] | None) -> None:
        """Undoes the changes: other callbacks see what this rank has logged."""
        for name, value in self.own.items():
            if logs is not None and value is None:
                del logs[name]
            elif logs is not None:
                logs[name] = value
        self.own = {}


class _AtTheEnd(_Internal):
    """Runs after all others: compares values, and stops all ranks if one stops."""

    def __init__(self, common: Fit, sync: rounds.Sync | None) -> None:
        super().__init__(common)
        self._sync = sync

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._sync is not None:
            self._sync.begin_epoch()
        if self.common.values is not None:
            return
        self.common.backend.build_step(self.common)  # callbacks may have frozen layers
        common = variables.in_common(self.model)
        self.common.values = Values(common, self.common.process_set, self.common.names)
        self.common.values.check("begun")
        if self.common.looks_at_data:
            self.common.backend.pass_first_batch(self.model, self._check_rows)

    def _check_rows(self, batch: Any) -> None:
        gathered = agree.gather_json("first rows", row_hashes(batch), self.common.process_set)
        check_rows(gathered, self.common.process_set)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = self.params.get("steps")
        if self.model.stop_training and (steps is None or batch + 1 < steps):
            self.common.stopped = f"a callback of this rank set stop_training in batch {batch + 1}"
        if self.common.values is not None and self._sync is None:
            self.common.values.check("step")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End the training of all ranks after the same epoch."""
        # As many callbacks do: if logs["accuracy"] > 0.99: self.model.stop_training = True.
        mine = bool(self.model.stop_training)
        stops = agree.gather_json("an epoch of fit has ended", mine, self.common.process_set)
        self.common.stopped = ""
        if any(stops):
            self.model.stop_training = True
