"""``Checkpoint``: saves the whole state of a training, and restores it after a restart."""

import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hvd_keras.callbacks import parts
from hvd_keras.callbacks.base import Callback

from hvd_keras import agree, ops, shards
from hvd_keras._keras import is_legacy
from hvd_keras.ops import objects
from hvd_keras.process_sets import ProcessSet, global_process_set
from hvd_keras.shards import state
from hvd_keras.training import checkpoint, fitting, preprocessing, variables


class Checkpoint(Callback):  # type: ignore[misc]
    """Saves the whole state of the training, and restores the last intact checkpoint.

    After a crash, start the script again, unchanged: ``fit`` continues at the epoch and batch of
    the last checkpoint, or returns at once if all epochs are done. On the same number of ranks the
    final weights are, bit for bit, those of a run without the crash.

    Rank 0 writes one file per checkpoint, atomically and with a SHA-256 of its content, and then
    removes older ones. Rank 0 alone reads, too, so the ranks need no shared file system. A damaged
    file is reported, and the one before it is used. Only tables that are divided between ranks
    (``hvd.layers``) and an optimizer's state in shares (``shard_state=True``) are written and read
    by all, into and from the same folder; a training with either loads what one without has
    written, and the other way round.

    Saved are weights, moving statistics, optimizer variables including the learning rate, epoch and
    batch, and the states of random generators: those of layers (dropout) and the global ones of
    Python and NumPy. Values that differ between ranks are saved for each rank.

    Data: what you pass to ``fit`` must begin with epoch ``initial_epoch``, see the example; the
    batches of that epoch that the model has seen are read and skipped. Training continues exactly
    if the order of an epoch depends on its number only: ``hvd.data.shard(…, start_epoch=…)``, or no
    shuffling; with ``dataset.repeat()`` and ``steps_per_epoch``, add ``.skip(initial_epoch *
    steps)``. Arrays that ``fit`` shuffles get a new order.

    On another number of ranks, values that were equal on all ranks are restored; the generators of
    dropout are derived from rank 0's, as ``BroadcastGlobalVariablesCallback`` does it; moving
    statistics become their mean; the learning rate is the checkpoint's, multiplied by the change of
    the rate that the script sets. In an interrupted epoch the rows that the ranks have seen are
    skipped to within one step, if a rank's batch has as many rows as before. Variables of layers
    that belong to one rank cannot be redistributed and are an error.

    Not saved: the Python state of other callbacks (``EarlyStopping``'s patience and best value);
    metrics, so those of an interrupted epoch cover its remaining batches only; TensorFlow's own
    random generators.

    In ``fit``, put it after the callbacks that change the model or the optimizer. It restores once;
    a later ``fit`` with the same instance only saves. See docs/checkpoints.md.

    Args:
        directory: the folder of the files, on rank 0; use it for one training only.
        keep: the number of checkpoints to keep, 1 or more. With 2 or more, a damaged last one can
            be replaced by the one before.
        save_freq: "epoch", or the number of batches after which to save, besides the epoch's end.
        restore: False trains from scratch; the first checkpoint then replaces all existing ones.
        process_set: the ranks that train the model; the first of them reads and writes.

    Raises:
        ValueError: an argument is impossible, or tf_keras is in use. In ``fit``, on every rank: the
            model has no variables and its step cannot be traced to create them; the checkpoint
            belongs to another model; or the ranks' arguments differ.
        RuntimeError: (in ``fit``, on every rank) all existing checkpoints are damaged.
        OSError: (in ``fit``, on rank 0; RuntimeError on the others) a checkpoint cannot be written,
            for example because the disk is full. Earlier ones remain.

    Example:
        checkpoint = hvd.callbacks.Checkpoint("checkpoints", save_freq=100)
        data = hvd.data.shard((x, y), batch_size=32, start_epoch=checkpoint.initial_epoch)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(data, epochs=10, callbacks=[broadcast, checkpoint])
    """

    _hvd_needs_variables = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 2,
        save_freq: str | int = "epoch",
        restore: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        if is_legacy:
            raise ValueError(
                "Checkpoint needs Keras 3, but tf_keras is in use. Unset TF_USE_LEGACY_KERAS, or "
                "use ModelCheckpoint."
            )
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"Checkpoint: keep is {keep!r}, expected a positive integer.")
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(
                f"Checkpoint: save_freq is {save_freq!r}, expected 'epoch' or a positive integer."
            )
        self._hvd_process_set = process_set
        self.directory = pathlib.Path(directory)
        self.keep = keep
        self.save_freq = save_freq
        self.restore = restore
        self._found: _Found | None = None
        self._initial_epoch: int | None = None
        self._skipping: _Skipping | None = None
        self._epoch = 0
        self._batches = 0  # done in this epoch
        self._rate: float | None = None  # the learning rate that the script sets

    @property
    def initial_epoch(self) -> int:
        """The epoch at which ``fit`` will continue; 0 if there is no checkpoint to restore.

        The first access reads the checkpoint and needs all ranks.
        """
        self._find()
        return self._initial_epoch or 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the state, after Keras has built the model."""
        self._check()
        self._stop_skipping()  # in case an earlier fit broke off while skipping
        found = self._find()
        self._found = None
        self._rate = _rate(self.model.optimizer)
        if found is not None:
            self._restore(found)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        self._epoch, self._batches = epoch, 0
        self._end_restart()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if ``save_freq`` is a number of batches."""
        before, self._batches = self._batches, batch + 1
        if self._skipping is not None:
            if self._batches >= self._skipping.batches:
                self._skipping.put_back()
                self._stop_skipping()
            return
        steps = self.params.get("steps")
        if steps is not None and self._batches >= steps:
            return  # the end of the epoch follows
        every = self.save_freq
        if isinstance(every, int) and self._batches // every > before // every:
            self._save(self._epoch, self._batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves."""
        if self._skipping is not None:
            expected = self._skipping.batches
            self._stop_skipping()
            raise ValueError(
                f"Checkpoint: the data ended after {self._batches} batches of epoch {epoch}, but "
                f"the model had seen {expected} when the checkpoint was written. "
                "Pass the same data to fit, or train from scratch with restore=False."
            )
        self._save(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the restart, also if no epoch was left to train."""
        self._end_restart()

    def _stop_skipping(self) -> None:
        if self._skipping is not None:
            self._skipping.stop()
            self._skipping = None

    def _end_restart(self) -> None:
        self.model._initial_epoch = None  # otherwise a later fit would start there, too
        variables.mark_restored(self.model, False)

    def _check(self) -> None:
        fitting.check_built(self.model)
        ranks = self._hvd_process_set.ranks
        if self.process_set is not self._hvd_process_set:
            raise ValueError(
                f"Checkpoint: got {self._hvd_process_set}, but {self.process_set} trains the "
                "model. Pass the optimizer's process_set to Checkpoint."
            )
        problem = None
        if not self.model.variables:
            problem = "the model has no variables. Build it first: call it once on a batch."
        arguments = f"keep={self.keep}, save_freq={self.save_freq!r}, restore={self.restore}"
        everyone = agree.gather_json(
            "checkpoint arguments", [problem, arguments], self._hvd_process_set
        )
        for rank, (text, _) in zip(ranks, everyone, strict=True):
            if text is not None:
                raise ValueError(f"Checkpoint: rank {rank}: {text}")
        if len({text for _, text in everyone}) > 1:
            told = "; ".join(
                f"rank {rank}: {text}" for rank, (_, text) in zip(ranks, everyone, strict=True)
            )
            raise ValueError(f"Checkpoint: the ranks' arguments differ: {told}.")

    def _find(self) -> "_Found | None":
        """Returns what rank 0 has found, on all ranks. Reads the directory once."""
        if self._initial_epoch is not None:
            return self._found
        bad_parts: dict[str, str] = {}
        while True:
            content, seen = self._look_on_leader(bad_parts)
            if seen["facts"] is None:
                break
            problem = parts.problem_of(self.directory, seen["facts"], self._hvd_process_set)
            if problem is None:
                break
            bad_parts[seen["path"]] = problem
        damaged = "; ".join(seen["damaged"])
        if seen["damaged"] and seen["facts"] is None:
            raise RuntimeError(
                f"Checkpoint: all checkpoints are damaged: {damaged}. To train from scratch, "
                "delete them or pass restore=False."
            )
        if seen["facts"] is None:
            self._initial_epoch = 0
            return None
        self._initial_epoch = seen["facts"]["epoch"]
        if self._hvd_process_set.rank() == 0 and damaged:
            warnings.warn(
                f"Checkpoint: damaged: {damaged}. Restoring {seen['path']}.", stacklevel=3
            )
        self._found = _Found(seen["path"], seen["facts"], seen["stored"], content)
        return self._found

    def _look_on_leader(self, bad_parts: dict[str, str]) -> tuple[Any, dict[str, Any]]:
        seen: dict[str, Any] = {}
        error: Exception | None = None
        content: checkpoint.Content | None = None
        if self._hvd_process_set.rank() == 0:
            try:
                content, seen = self._look(bad_parts)
            except Exception as caught:
                error = caught
                seen = {"error": f"{type(caught).__name__}: {caught}"}
        leader = self._hvd_process_set.ranks[0]
        seen = objects.broadcast_object(
            seen, leader, name="checkpoint found", process_set=self._hvd_process_set
        )
        if error is not None:
            raise error
        if "error" in seen:
            raise RuntimeError(f"rank {leader} could not look for checkpoints: {seen['error']}")
        return content, seen

    def _look(self, bad_parts: dict[str, str]) -> tuple[checkpoint.Content | None, dict[str, Any]]:
        checkpoint.remove_unfinished(self.directory)
        parts.remove_others(self.directory, None, [])
        damaged = []
        for path in checkpoint.files(self.directory) if self.restore else []:
            if str(path) in bad_parts:
                damaged.append(f"{path}: {bad_parts[str(path)]}")
                continue
            try:
                content = checkpoint.read(path)
            except (checkpoint.DamagedError, OSError) as error:
                damaged.append(f"{path}: {error}")
                continue
            stored = [
                (v.path, v.value.shape[v.by_rank :], v.value.dtype.name, v.by_rank)
                for v in content.variables
            ]
            seen = {"path": str(path), "facts": content.facts, "stored": stored}
            return content, {**seen, "damaged": damaged}
        return None, {"path": None, "facts": None, "stored": None, "damaged": damaged}

    def _restore(self, found: "_Found") -> None:
        own = variables.of_training(self.model)
        same_ranks = found.facts["ranks"] == self._hvd_process_set.size()
        self._refuse_what_does_not_fit(found, own, same_ranks)
        _assign(found, own, self.model, self._hvd_process_set)
        if found.tables:
            parts.restore(self.directory, found.facts, own, self._hvd_process_set)
        if same_ranks:
            variables.set_random_state(found.facts["random"][self._hvd_process_set.rank()])
        self.model._initial_epoch = found.facts["epoch"]
        variables.mark_restored(self.model, True)
        if not same_ranks and self._rate and found.facts.get("rate"):
            # Keeps the warm-up, decay or reduction that it had.
            saved = float(self.model.optimizer.learning_rate)
            self.model.optimizer.learning_rate = saved * self._rate / found.facts["rate"]
        batches = self._batches_seen(found)
        if batches:
            self._skipping = _Skipping(self.model, own, batches)

    def _batches_seen(self, found: "_Found") -> int:
        """Returns how many batches of this epoch to skip."""
        then, now, batch = found.facts["ranks"], self._hvd_process_set.size(), found.facts["batch"]
        calls = self.model.steps_per_execution
        batches = batch if then == now else batch * then // now // calls * calls
        again = batch * then - batches * now
        if again and self._hvd_process_set.rank() == 0:
            warnings.warn(
                f"Checkpoint: {found.path} was written by {then} ranks after batch {batch} of "
                f"epoch {found.facts['epoch']}; now there are {now} ranks. {batches} batches are "
                f"skipped, and the rows of {again} batch{'es' * (again > 1)} are used again.",
                stacklevel=3,
            )
        return int(batches)

    def _refuse_what_does_not_fit(self, found: "_Found", own: list[Any], same_ranks: bool) -> None:
        differences = parts.differences(found.stored, found.facts, own)
        if not same_ranks:
            layers = list(self.model._flatten_layers())
            divisible = [*variables.seed_states(layers), *variables.moving_statistics(layers)]
            differences += [
                f"{path} differs between the {found.facts['ranks']} ranks of the checkpoint, but "
                f"now there are {self._hvd_process_set.size()} ranks"
                for (path, _, _, by_rank), variable in zip(found.stored, own, strict=False)
                if by_rank and not any(variable is other for other in divisible)
            ]
        calls = self.model.steps_per_execution
        if same_ranks and found.facts["batch"] % calls:
            differences.append(
                f"saved after {found.facts['batch']} batches, which steps_per_execution={calls} "
                "does not divide"
            )
        everyone = agree.gather_json("checkpoint fits", differences[:5], self._hvd_process_set)
        for rank, theirs in zip(self._hvd_process_set.ranks, everyone, strict=True):
            if theirs:
                raise ValueError(
                    f"Checkpoint: {found.path} does not fit this model and optimizer on rank "
                    f"{rank}: {'; '.join(theirs)}. Use another directory for this training, or "
                    "pass restore=False."
                )

    def _save(self, epoch: int, batch: int) -> None:
        own = variables.of_training(self.model)
        apart = _of_each_rank(own, self._hvd_process_set)
        facts: dict[str, Any] = {
            "epoch": epoch,
            "batch": batch,
            "ranks": self._hvd_process_set.size(),
            "rate": self._rate,
            "random": _random_states(self._hvd_process_set),
        }
        path = checkpoint.path_of(self.directory, epoch, batch)
        tables = parts.facts_of(own)
        names = parts.write(path, own, tables, self._hvd_process_set)
        facts["parts"] = {"tables": tables, "files": names}

        def value(i: int) -> Any:
            if str(i) in tables:  # is in the parts
                return np.zeros(0, tf.as_dtype(own[i].dtype).as_numpy_dtype)
            return apart[i] if i in apart else np.asarray(own[i])

        def write() -> None:
            values = (checkpoint.Variable(v.path, i in apart, value(i)) for i, v in enumerate(own))
            checkpoint.write(path, facts, values)
            checkpoint.prune(path, self.keep)
            parts.remove_others(self.directory, path, names)

        checkpoint.on_leader(self._hvd_process_set, write)


class _Found:
    """A checkpoint as all ranks know it; only rank 0 has the values."""

    def __init__(self, path: str, facts: dict[str, Any], stored: list[Any], content: Any) -> None:
        self.path = path
        self.facts = facts
        self.stored = stored  # (path, shape, dtype, whether by rank) of each variable
        self.content = content
        self.tables = facts.get("parts", {}).get("tables", {})  # of what is in other files


class _Skipping:
    """Lets ``fit`` read the batches that the model has seen, without training on them.

    Other callbacks are called for these batches, so that their counters are right. Their changes to
    the model are undone when the position of the checkpoint is reached.
    """

    def __init__(self, model: Any, own: list[Any], batches: int) -> None:
        self.batches = batches
        self._read = 0
        self._model = model
        self._own = shards.without(own)  # a copy of the tables might not fit
        self._values = [np.asarray(variable).copy() for variable in self._own]
        self._random = variables.random_state()
        self._train_function = model.train_function
        model.train_function = self._skip

    def _skip(self, iterator: Any) -> Any:
        if self._read >= self.batches:  # an earlier fit broke off before stop()
            return self._train_function(iterator)
        self._read += self._model.steps_per_execution
        next(iterator)  # raises at the end of the data, as Keras's function does
        for _ in range(1, self._model.steps_per_execution):
            next(iterator, None)
        return {}

    def put_back(self) -> None:
        """Restores the state of the checkpoint."""
        for variable, value in zip(self._own, self._values, strict=True):
            variable.assign(value)
        variables.set_random_state(self._random)

    def stop(self) -> None:
        """Lets ``fit`` train from now on."""
        self._model.train_function = self._train_function


def _rate(optimizer: Any) -> float | None:
    """Returns the optimizer's learning rate; None if it is a schedule or does not exist."""
    try:
        rate = optimizer.learning_rate
    except AttributeError:  # a MultiOptimizer has none of its own
        return None
    return float(rate) if isinstance(rate, keras.Variable) else None


def _random_states(process_set: ProcessSet) -> list[Any]:
    """Returns every rank's state. States are large, so they are exchanged only if they differ."""
    mine = variables.random_state()
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = agree.gather_json("checkpoint random digests", digest, process_set)
    if len(set(digests)) == 1:
        return [mine] * len(digests)
    return agree.gather_json("checkpoint random state", mine, process_set)


def _assign(found: _Found, own: list[Any], model: Any, process_set: ProcessSet) -> None:
    values = found.content.variables if process_set.rank() == 0 else [None] * len(own)
    common = []
    described = zip(own, values, found.stored, strict=True)
    for i, (variable, value, (_, shape, _, by_rank)) in enumerate(described):
        if str(i) in found.tables:
            continue
        if by_rank:
            whole = (found.facts["ranks"], *shape)
            stack = _to_all_ranks(whole, variable.dtype, value, process_set)
            # On another number of ranks, only moving statistics and seeds (set below) get here.
            same_ranks = len(stack) == process_set.size()
            variable.assign(stack[process_set.rank()] if same_ranks else _mean(stack))
        elif shards.of(variable) is not None:
            state.set_share(variable, _to_all_ranks(shape, variable.dtype, value, process_set))
        else:
            common.append(variable)
            if value is not None:
                variable.assign(value.value)
    variables.assign_values_of(process_set.ranks[0], common, process_set)
    if preprocessing.refresh_derived_values(model._flatten_layers()):
        fitting.forget_functions(model)  # they hold the old values as constants
    if found.facts["ranks"] != process_set.size():
        seeds = variables.seed_states(model._flatten_layers())
        variables.give_each_rank_its_own_randomness(seeds, process_set)


def _mean(stack: Any) -> Any:
    return stack[0] if stack.dtype.kind in "iu" else stack.mean(axis=0)


def _to_all_ranks(shape: Sequence[int], of_dtype: Any, value: Any, process_set: ProcessSet) -> Any:
    """Broadcasts rank 0's value of this shape and dtype; as bytes, so any dtype works."""
    dtype = np.dtype(tf.as_dtype(of_dtype).as_numpy_dtype)
    if value is None:
        data = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    else:
        data = np.frombuffer(value.value.tobytes(), np.uint8)
    received = ops.broadcast(data, process_set.ranks[0], process_set=process_set)
    return np.frombuffer(received.numpy().tobytes(), dtype).reshape(shape)


def _of_each_rank(own: list[Any], process_set: ProcessSet) -> dict[int, Any]:
    """Returns the stacked values of all ranks, by index, for variables that differ by rank."""
    if process_set.size() == 1:
        return {}
    # Parts of tables have files of their own, so they do not count as different.
    mine = b"".join(
        hashlib.sha256(b"" if shards.of(v) else np.asarray(v).tobytes()).digest() for v in own
    )
    everyone = agree.gather_bytes("checkpoint digests", mine, process_set)
    if len({len(digests) for digests in everyone}) > 1:
        counts = [len(digests) // 32 for digests in everyone]
        raise ValueError(f"Checkpoint: the ranks train different models, of {counts} variables.")
    places = [
        i
        for i in range(len(own))
        if len({digests[32 * i : 32 * i + 32] for digests in everyone}) > 1
    ]
    apart = {}
    for i in places:
        value = np.asarray(own[i])
        parts = agree.gather_bytes("checkpoint by rank", value.tobytes(), process_set)
        apart[i] = np.frombuffer(b"".join(parts), value.dtype).reshape(-1, *value.shape)
    return apart
