"""``BroadcastGlobalVariablesCallback``: the same state on all ranks."""

from collections.abc import Iterable
from typing import Any

from hvd_keras.callbacks.base import Callback

import hvd_keras as hvd
from hvd_keras.gradients import model_ranks, specs
from hvd_keras.runtime.keras import overrides
from hvd_keras.training import fit_state, preprocessing, variables


class BroadcastGlobalVariablesCallback(Callback):  # type: ignore[misc]
    """Gives all ranks the root rank's model and optimizer state before the first step.

    It broadcasts weights, moving statistics, optimizer slots, iteration counts and the learning
    rate. Random generators (dropout, augmentation) get the root's seed mixed with the rank, so that
    masks differ between ranks and a rerun repeats them; so does the generator that
    ``keras.random`` uses without a seed.

    If the model has no variables before its first step (a Sequential without ``Input``, a subclass
    of ``keras.Model``), they are created first, by tracing a step into a graph that never runs.

    Preprocessing layers: ``Normalization`` recomputes the values that it derives from its
    variables. Vocabularies and the like are not variables; if they differ between ranks, an error
    names the layer.

    Layers that belong to one rank (``hvd.PartialDistributedOptimizer``, ``register_local_var``)
    keep their values, and so do parts of tables and an optimizer's slots with
    ``shard_state=True``, of which the root has its own only.

    At the end of each epoch, before validation and checkpoints, the moving statistics of batch
    normalisation, and gradients that are accumulated for a later update, are averaged over the
    ranks; during the epoch each rank's cover its own batches only. ``hvd.SyncBatchNormalization``
    computes the statistics of one process.

    A state that ``Checkpoint`` has restored is not overwritten, in whatever order the two callbacks
    are given.

    Each ``fit`` begins with a broadcast. One instance can be used for several models.

    Args:
        root_rank: the rank whose state all ranks get.
        local_variables: variables, or one, that keep their values, besides those that the optimizer
            knows as local: those of a ``hvd.PartialDistributedGradientTape`` in ``train_step``,
            because a tape names them only in the first step.

    Raises:
        ValueError: (in ``fit``, on every rank) ``root_rank`` is not among the ranks that train the
            model; or a step of the model cannot be traced to create its variables; or the ranks'
            models or vocabularies differ.

    Example:
        model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    _hvd_communicates = True

    def __init__(self, root_rank: int, local_variables: Iterable[Any] | Any = ()) -> None:
        super().__init__()
        self.root_rank = root_rank
        is_one = hasattr(local_variables, "assign")
        self._local = [local_variables] if is_one else list(local_variables or ())
        self._epoch_runs = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts. The model has its variables by now."""
        model_ranks.local_variables.add(*self._local)
        process_set = self.process_set
        if not model_ranks.alone.get():
            process_set.check_root(self.root_rank)
        seeds = variables.global_seed_states()
        if process_set.size() == 1:
            one = len(model_ranks.optimizers_of(self.model)) == 1  # several may update parts
            if one and variables.is_built(self.model):
                variables.training_variables(self.model)  # builds it, as on several ranks
            return
        fit_state.check_built(self.model)
        layers = list(self.model._flatten_layers())
        preprocessing.check_equal_on_all_ranks(layers, process_set, self.root_rank)
        # Not the optimizer's variables: Keras's counters occur elsewhere in their names.
        described = map(specs.spec_of, model_ranks.without_local(self.model.variables))
        specs.check_specs("broadcast", list(described), process_set)
        # The first call of an eager step of one's own builds its optimizers.
        builds = not (self.model.run_eagerly and overrides(self.model, "train_step"))
        shared = model_ranks.without_local(variables.training_variables(self.model, builds))
        own = variables.average_accumulated(self.model, process_set)  # of an earlier fit
        own += variables.recurrent_states(layers)
        own += [v for rounds in model_ranks.rounds_of(self.model) for v in rounds.variables()]
        shared = [v for v in shared if not any(v is other for other in own)]
        hvd.broadcast_variables([*shared, *seeds], self.root_rank, process_set)
        variables.give_each_rank_its_own_randomness(variables.own_generators, process_set)
        preprocessing.refresh(self.model, process_set)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch_runs = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Average at the last batch, before other callbacks save or evaluate the model."""
        steps = self.params.get("steps")
        if steps is not None and batch + 1 >= steps:  # steps_per_execution may overshoot
            self._average_once()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average, if the data's length is unknown and this rank validates."""
        self._average_once()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, if the data's length is unknown and this rank does not validate."""
        self._average_once()

    def _average_once(self) -> None:
        if self._epoch_runs and not model_ranks.rounds_of(self.model):  # whose ends average
            self._epoch_runs = False
            statistics = variables.moving_statistics(self.model._flatten_layers())
            variables.average_variables(model_ranks.without_local(statistics), self.process_set)
            variables.average_accumulated(self.model, self.process_set)
