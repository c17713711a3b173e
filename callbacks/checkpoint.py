"""``Checkpoint``: saves the whole state of a training, and restores it after a restart."""

import contextlib
import functools
import os
import pathlib
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from hvd_keras.callbacks.base import Callback

from hvd_keras.data.sources import Passes
from hvd_keras.gradients import missing_calls, model_ranks, shards
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import innermost_of, is_legacy, replace_values, snapshot
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.saving import background, per_rank, resuming, storage
from hvd_keras.training import metric_states, preprocessing, variables
from hvd_keras.training.fit_state import Fit, check_built, running


class Checkpoint(Callback):  # type: ignore[misc]
    """Saves the whole state of the training, and restores the last intact checkpoint.

    After a crash, start the script again, unchanged: ``fit`` continues at the epoch and batch of
    the last checkpoint, or returns at once if all epochs are done. On the same number of ranks the
    final weights are, bit for bit, those of a run without the crash, if the order of an epoch's
    data depends on its number only, as that of ``hvd.data.shard`` does.

    Saved are weights, moving statistics, optimizer variables including the learning rate, epoch and
    batch, the metrics of the epoch so far, what Keras's callbacks decide by (such as the patience
    of ``EarlyStopping``), and the states of random generators: those of layers (dropout) and the
    global ones of Python and NumPy. Not saved is the Python state of other callbacks.
    docs/checkpoints.md describes other data, restarts on another number of ranks, and the files.

    The values are taken between two steps and written by a thread while training goes on. Until
    that is done, rank 0 holds them twice, as far as training has changed them.

    Rank 0 alone reads and writes, so the ranks need no shared file system, except for tables that
    are divided between ranks (``hvd.layers``) and an optimizer's state in shares
    (``shard_state=True``), of which all write and read their parts.

    In ``fit`` it runs after all other callbacks, so it saves what they have changed, and its state
    replaces theirs. A script may pass one instance to several ``fit``, one after the other: started
    again, it returns from those that were complete without training, and continues in the one that
    was interrupted.

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
        RuntimeError: (in ``fit``, on every rank) all existing checkpoints are damaged, another
            rank has a newer one on its host's disk than the first, or another job saves there, too.
        OSError: (in ``fit``, on every rank, at the next save or the end at the latest) a checkpoint
            cannot be written, for example because the disk is full. Earlier ones remain.

    Example:
        checkpoint = hvd.callbacks.Checkpoint("checkpoints", save_freq=100)
        data = hvd.data.shard((x, y), batch_size=32)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(data, epochs=10, callbacks=[broadcast, checkpoint])
    """

    _hvd_needs_variables = _hvd_communicates = True
    _hvd_runs_last = True

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
        self.directory = pathlib.Path(directory).absolute()
        self.keep, self.save_freq, self.restore = keep, save_freq, restore
        self._found: per_rank.Found | None = None
        self._initial_epoch: int | None = None
        self._training = ""  # its id, on rank 0
        self._resuming: resuming.Resuming | None = None
        self._epoch, self._batches = 0, 0  # and the batches of it that are done
        # Of each optimizer, the learning rate that the script has set before the first fit.
        self._rates: weakref.WeakKeyDictionary[Any, float | None] = weakref.WeakKeyDictionary()
        self._fits: list[int] = []  # the epochs of each fit with this instance that has ended
        self._rows: int | None = None  # of a step of all ranks, if that is known
        self._preprocessing: list[list[str]] = []
        self._ended: list[Any] = []  # where each was in its data then
        self._random: list[Any] = []  # the states of generators then
        self._passes: Sequence[Passes] = ()  # of this fit's data
        self._validation: Sequence[Passes] = ()
        self._writing = background.Background(process_set)

    @property
    def initial_epoch(self) -> int:
        """The epoch at which ``fit`` will continue; 0 if there is no checkpoint to restore.

        The first access reads the checkpoint and needs all ranks.
        """
        self._find()
        return self._initial_epoch or 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the state, after Keras has built the model."""
        self._hvd_process_set.check_included("callbacks.Checkpoint")  # raises before init()
        fit = running(self.model)
        if fit is None and not missing_calls.in_fit.get():
            raise ValueError(
                "Checkpoint works in fit only. In a loop of your own call model.save on all ranks, "
                "and load the model at the next start."
            )
        if fit is None:
            raise ValueError(
                "Checkpoint: this rank trains the model alone (hvd.local_fit), and expected "
                f"{self._hvd_process_set}. Use keras.callbacks.BackupAndRestore there."
            )
        self._check(fit.process_set)
        # In case an earlier fit broke off.
        self._resuming = None
        self._writing.forget()
        found = self._find_newest(fit)
        epochs = int(self.params["epochs"])
        for optimizer in self._optimizers():
            self._rates.setdefault(optimizer, resuming.rate_of(optimizer))
            replace_values(optimizer)
        self._passes = fit.passes
        others = fit.backend.passes_of(fit.arguments["validation_data"])
        self._validation = [one for one in others if not any(one is own for own in fit.passes)]
        self._rows = resuming.rows_of_step(fit)
        self._preprocessing = preprocessing.digests(self.model._flatten_layers())
        resuming.tell_what_is_read_again(fit, self.save_freq)
        if found is None:
            return
        # The epochs of each fit until then: if more of them follow, this one was complete.
        fits, mine = found.metadata["fits"], [*self._fits, epochs]
        is_complete = len(fits) > len(mine) and fits[: len(mine)] == mine
        has_stopped = found.metadata["stopped"] and fits == mine
        variables.build_optimizers(self.model, found.metadata["updated"])
        own, begun = found.match_rounds(self.model, variables.training_variables(self.model))
        # An earlier fit may have trained other variables.
        fits_here = not per_rank.differences(found, own)
        if is_complete:
            fits_here &= not self._other_preprocessing(found)  # the later one may have adapted it
            named = "checkpoint of a later fit"
            fits_here = all(agree.gather_json(named, fits_here, self._hvd_process_set))
        if fits_here or not is_complete:
            self._restore(found, own)
        for one in begun:
            one.begin(is_restored=False)
        fit.restored = True
        number = len(self._fits) - len(fits) if is_complete else -1
        if then := resuming.random_of_rank(found, number, self._hvd_process_set):
            per_rank.set_random_state(then[0])
            variables.set_global_seeds(then[1])
        if is_complete:
            of_data, of_validation = found.metadata["ended"][len(self._fits)]
            resuming.restore_passes(self._passes, of_data)
            resuming.restore_passes(self._validation, of_validation)
        else:
            self._found = None
            self._go_on(found, fit)
        if is_complete or has_stopped:
            self.model._initial_epoch = epochs
        if self._hvd_process_set.rank() == 0:
            batch = self._resuming.batches if self._resuming else 0
            told = resuming.message(found, epochs, batch, is_complete, has_stopped, fits_here)
            print(f"hvd_keras: {told}", file=sys.stderr, flush=True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._batches = epoch, 0
        if self._resuming is not None:  # the epoch began in another process
            self._batches = self._resuming.batches
            self._resuming.put_back()
        else:
            for passes in self._passes:
                passes.epoch = passes.next
        self.model._initial_epoch = None  # otherwise a later fit would start there, too

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._writing.look()
        before, self._batches = self._batches, batch + 1
        steps = self.params.get("steps")
        if steps is not None and self._batches >= steps:
            return  # the end of the epoch follows
        every = self.save_freq
        # steps_per_execution may step over a multiple of save_freq.
        if isinstance(every, int) and self._batches // every > before // every:
            self._save(self._epoch, self._batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        resumed, self._resuming = self._resuming, None
        if resumed is not None and resumed.passed < resumed.batches:
            raise ValueError(
                f"Checkpoint: the data ended after {resumed.passed} batches of epoch {epoch}, but "
                f"the model had seen {resumed.batches} when the checkpoint was written. "
                "Pass the same data to fit, or train from scratch with restore=False."
            )
        self._save(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.model._initial_epoch = None
        self._writing.finish()
        if self._found is None:  # otherwise that of a later fit is kept
            self._initial_epoch = 0
        self._fits.append(int(self.params["epochs"]))
        self._ended.append([[p.state(0) for p in ps] for ps in (self._passes, self._validation)])
        self._random = [*self._random[-resuming.KEPT_RANDOM :], _random()]

    def _check(self, of_fit: ProcessSet) -> None:
        check_built(self.model)
        own = self._hvd_process_set
        if of_fit.id() != own.id():
            raise ValueError(
                f"Checkpoint: got {own}, but {of_fit} trains the model. Pass the optimizer's "
                "process_set to Checkpoint."
            )

        def check_variables() -> None:
            if not self.model.variables:
                raise ValueError("the model has no variables. Call it once on a batch before fit.")

        agree.on_all_ranks("Checkpoint", check_variables, own)
        arguments = f"keep={self.keep}, save_freq={self.save_freq!r}, restore={self.restore}"
        local = [v for v in self.model.variables if v in model_ranks.local_variables]
        shapes = [list(variable.shape) for variable in local]
        gathered = agree.gather_json("Checkpoint arguments", [arguments, shapes], own)
        names = "arguments", "local layers' shapes"
        for what, views in zip(names, zip(*gathered, strict=True), strict=True):
            if any(view != views[0] for view in views):
                raise ValueError(
                    f"Checkpoint: the ranks' {what} differ: {agree.by_rank(views, own)}. Expected "
                    "the same on all ranks."
                )

    def _find(self) -> per_rank.Found | None:
        """Return what rank 0 has found, on all ranks. Reads the directory once."""
        if self._initial_epoch is None:
            own = self._hvd_process_set
            self._found, self._training = per_rank.find(self.directory, self.restore, own)
            self._initial_epoch = self._found.metadata["epoch"] if self._found else 0
        return self._found

    def _find_newest(self, fit: Fit) -> per_rank.Found | None:
        """Return what is found, unless another of this fit's callbacks has found a newer one."""
        every = [one for one in fit.callbacks if isinstance(one, Checkpoint)]
        metadata = [found.metadata if (found := one._find()) else {} for one in every]
        reached = [(len(m["fits"]), m["epoch"], m["batch"]) if m else () for m in metadata]
        for one in every:
            if one is not every[reached.index(max(reached))]:
                one._found = None  # it only saves
        return self._found

    def _restore(self, found: per_rank.Found, own: list[Any]) -> None:
        same_ranks = found.metadata["ranks"] == self._hvd_process_set.size()
        self._refuse_what_does_not_fit(found, own, same_ranks)
        self._assign(found, own)
        for optimizer, then in zip(self._optimizers(), found.metadata["rates"], strict=False):
            # Keeps the warm-up, decay or reduction that it had.
            if not same_ranks and then and (now := self._rates.get(optimizer)):
                optimizer.learning_rate = float(optimizer.learning_rate) * now / then

    def _optimizers(self) -> list[Any]:
        # A model may hold both a LossScaleOptimizer and the one inside it.
        return innermost_of(model_ranks.optimizers_of(self.model, within=True))

    def _scheduled(self) -> list[Any]:
        outer = [one.outer for one in model_ranks.rounds_of(self.model)]
        return innermost_of([*self._optimizers(), *outer])

    def _assign(self, found: per_rank.Found, own: list[Any]) -> None:
        process_set, ranks = self._hvd_process_set, found.metadata["ranks"]
        for i, (variable, described) in enumerate(zip(own, found.stored, strict=True)):
            if str(i) in found.tables:
                per_rank.restore(self.directory, found.metadata, i, variable)
                continue
            value = found.value(i, process_set)
            if described[-1]:
                # On another number of ranks, only moving statistics, accumulated gradients, seeds
                # (set below) and what sync_every lets differ get here.
                same = ranks == process_set.size() and not found.rounds
                value = value[process_set.rank()] if same else per_rank.mean(value)
            shards.assign(variable, value)
        preprocessing.refresh(self.model, process_set)
        if ranks != process_set.size():
            seeds = variables.seed_states(self.model._flatten_layers())
            variables.give_each_rank_its_own_randomness(seeds, process_set)

    def _go_on(self, found: per_rank.Found, fit: Fit) -> None:
        self.model._initial_epoch = found.metadata["epoch"]
        # The rows of a step then and now; if unknown, the ranks.
        steps = found.metadata["ranks"], self._hvd_process_set.size()
        if found.metadata["rows"] and self._rows:
            steps = found.metadata["rows"], self._rows
        lengths = found.metadata.get("lengths", ())
        resuming.let_schedules_go_on(self._scheduled(), lengths, *steps)
        if self.params["steps"] and found.metadata.get("steps") == self.params["steps"]:
            steps = 1, 1  # as in repeated data
        metrics = self._take_over(found, fit)
        states = found.metadata["passes"]
        resuming.restore_passes(self._passes, states)
        resuming.restore_passes(self._validation, found.metadata["validation"])
        goes_on = any(passes.goes_on for passes in self._passes)
        if goes_on:
            # Keras's iterator has not begun. What the last pass has read of is read again.
            fit.iterator._distributed_dataset = fit.dataset.skip(self._passes[0].read)
        if found.metadata["batch"] == 0:
            return
        seeks, calls = fit.seekable is not None, self.model.steps_per_execution
        if calls > 1:  # a call of several steps must neither begin nor end within what is skipped
            same_ranks = found.metadata["ranks"] == self._hvd_process_set.size()
            seeks &= same_ranks and self.params["steps"] % calls == 0
        if seeks and len(states) == 1:
            assert fit.seekable is not None
            batches = fit.seekable.seek(states[0][2])
            fit.looks_at_data = False  # the first batch is that after those skipped
        else:
            seeks, batches = False, resuming.batches_seen(found, *steps, calls, fit.process_set)
        if batches:
            own = [*variables.training_variables(self.model), *variables.global_seed_states()]
            own += variables.unlisted(self.model._flatten_layers(), generators=True).values()
            reads = not (seeks or goes_on) or getattr(fit.seekable, "yields_unread", False)
            self._resuming = resuming.Resuming(fit, own, batches, reads, metrics)

    def _take_over(self, found: per_rank.Found, fit: Fit) -> list[Any]:
        """Give callbacks the state that they had; return the metrics' values for this rank."""
        metrics, kept = [], []
        rank, ranks = self._hvd_process_set.rank(), found.metadata["ranks"]
        same_ranks = ranks == self._hvd_process_set.size()
        attributes = variables.unlisted(self.model._flatten_layers(), generators=True)
        for number, described in enumerate(found.more, len(found.stored + found.rounds)):
            path, *_, by_rank = described
            if path.startswith(per_rank.CALLBACK):
                weight = self.model.weights[int(path.rpartition(" ")[2])]
                kept.append(resuming.Kept(path, weight, weight))
            if str(number) in found.tables:
                per_rank.restore(self.directory, found.metadata, number, kept[-1])
                continue
            value = found.value(number, self._hvd_process_set)
            mine = value[rank % ranks] if by_rank else value
            if path.startswith(per_rank.ATTRIBUTE):
                resuming.set_attribute(attributes, path, mine)
            elif path.startswith(per_rank.CALLBACK):
                shards.assign(kept[-1], mine)
            elif same_ranks:
                metrics.append(mine)
            else:  # states are sums, of which one rank may have all
                total = value.sum(axis=0) if by_rank else value * ranks
                metrics.append(total if rank == 0 else np.zeros_like(total))
        numbers = found.metadata["callbacks"]
        resuming.set_state(fit.callbacks, numbers[rank % len(numbers)], kept)
        if metrics:
            fit.backend.build_metrics(fit)
            own = [] if same_ranks else resuming.metrics_of(self.model)
            no_sums = [type(one).__name__ for one in own if not metric_states.is_summable(one)]
            return resuming.check_metrics(self.model, metrics, no_sums)
        return metrics

    def _refuse_what_does_not_fit(
        self, found: per_rank.Found, own: list[Any], same_ranks: bool
    ) -> None:
        differences = per_rank.differences(found, own)
        differences += self._other_preprocessing(found)
        if not same_ranks:
            layers = list(self.model._flatten_layers())
            divisible = [*variables.seed_states(layers), *variables.moving_statistics(layers)]
            divisible += variables.accumulators(self.model)
            divisible += own if found.rounds or model_ranks.rounds_of(self.model) else []
            pairs = list(zip(found.stored, own, strict=False))
            attributes = [one for one in found.more if one[0].startswith(per_rank.ATTRIBUTE)]
            # But the state of a random generator.
            pairs += [(one, None) for one in attributes if one[2] != "uint32"]
            differences += [
                f"{path} differs between the {found.metadata['ranks']} ranks of the checkpoint, "
                f"but now there are {self._hvd_process_set.size()} ranks"
                for (path, _, _, by_rank), variable in pairs
                if by_rank and not any(variable is other for other in divisible)
            ]
        calls = self.model.steps_per_execution
        if same_ranks and found.metadata["batch"] % calls:
            differences.append(
                f"saved after {found.metadata['batch']} batches, which steps_per_execution={calls} "
                "does not divide"
            )

        def check() -> None:
            if differences:
                raise ValueError(
                    f"{found.path} does not fit this model and optimizer: "
                    f"{'; '.join(differences[:5])}. Use another directory for this training, or "
                    "pass restore=False."
                )

        agree.on_all_ranks("Checkpoint", check, self._hvd_process_set)

    def _other_preprocessing(self, found: per_rank.Found) -> list[str]:
        then = found.metadata.get("preprocessing", self._preprocessing)
        is_first = self._hvd_process_set.rank() == 0  # whose layers are in the file
        return preprocessing.differences(then, self._preprocessing) if is_first else []

    def _save(self, epoch: int, batch: int) -> None:
        """Take the state as it is now; threads write it while training goes on."""
        self._writing.finish()  # no more than one copy of the state is held
        process_set = self._hvd_process_set
        own = variables.training_variables(self.model)
        metrics = resuming.metric_variables(self.model) if batch else []
        fit = running(self.model)
        callbacks = fit.callbacks if fit else []
        mine_now = [bool(self.model.stop_training), resuming.numbers_of(callbacks)]
        states = agree.gather_if_different("callbacks' state", mine_now, process_set) or [mine_now]
        others = variables.unlisted(self.model._flatten_layers(), generators=True)
        variables.tell_unsaved(self.model, [*own, *others.values()], process_set)
        kept = resuming.kept_of(others, process_set)
        kept += resuming.arrays_of(callbacks, states[0][1], self.model)
        values = [*map(snapshot, [*own, *metrics]), *(array.value for array in kept)]
        # Most variables are equal, by construction: these are written from rank 0 alone.
        equal = resuming.compared_by(fit) if fit else set()
        everything = [*own, *metrics, *kept]
        differing = per_rank.gather_differing(everything, values, equal, process_set)
        path = storage.path_of(self.directory, epoch, batch)
        tables, parts = per_rank.describe(everything), per_rank.parts_of(everything, values)
        files = per_rank.names_of(path, tables, process_set)
        names = [file.name for file in files]
        metadata: dict[str, Any] = {
            "epoch": epoch,
            "batch": batch,
            "ranks": process_set.size(),
            "rows": self._rows,
            "steps": self.params.get("steps"),
            "lengths": [*map(resuming.length_of, self._scheduled())],
            "preprocessing": self._preprocessing,
            "updated": variables.updated_by(self.model),
            "rates": [self._rates.get(optimizer) for optimizer in self._optimizers()],
            "fits": [*self._fits, int(self.params["epochs"])],
            "ended": self._ended,
            "passes": [passes.state(batch) for passes in self._passes],
            "validation": [passes.state(0) for passes in self._validation],
            **resuming.random_of_ranks([*self._random, _random()], process_set),
            "stopped": any(stops for stops, _ in states),
            "callbacks": [numbers for _, numbers in states],
            "parts": {"tables": tables, "files": names},
        }
        mine = files[process_set.rank()] if files else path
        stored = []
        if process_set.rank() == 0:  # the others hold no copy
            names_now = [variable.path for variable in own]
            names_now += [per_rank.METRIC + variable.path for variable in metrics]
            names_now += [array.path for array in kept]
            for i, (name, value) in enumerate(zip(names_now, values, strict=True)):
                # Those of tables are in the parts.
                value = value.reshape(-1)[:0] if str(i) in tables else value
                stored.append(storage.Variable(name, i in differing, differing.get(i, value)))

        def write() -> None:
            if stored:
                storage.refuse_others(self.directory)
                storage.write(path, metadata, stored, self._training)
                storage.refuse_others(self.directory)  # may have written meanwhile
                storage.prune(path, self.keep)
                per_rank.remove_others(self.directory, path, names)

        def undo() -> None:
            if tables:
                with contextlib.suppress(OSError):
                    mine.unlink()

        steps: list[background.Step] = [("Checkpoint: cannot write", write)]
        if tables:
            write_parts = functools.partial(storage.write, mine, {}, parts)
            steps.insert(0, ("Checkpoint: cannot write a rank's part", write_parts))
        self._writing.begin(steps, undo)


def _random() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generators, and Keras's seeds."""
    return per_rank.random_state(), variables.global_seeds()
