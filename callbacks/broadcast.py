"""Same state on all ranks."""

import functools
from collections.abc import Iterable
from typing import Any

from hvd_keras.callbacks.base import Callback

from hvd_keras import log, rank_info, xla
from hvd_keras.ops.broadcast import check_root
from hvd_keras.training import building, exchange, fitting, preprocessing, reducer, variables


class BroadcastGlobalVariablesCallback(Callback):  # type: ignore[misc]
    """Gives all ranks the root's model and optimizer state before the first step.

    Weights, moving statistics, optimizer slots, iteration counts and the learning rate become
    equal. Random generators (dropout, augmentation) get the root's seed mixed with the rank: every
    rank draws other masks, and a rerun draws the same ones again.

    A model that has no variables before its first step (a Sequential without ``Input``, a subclass
    of ``keras.Model``) gets them first: its step is traced once more, into a graph that never runs.

    Preprocessing layers: what ``Normalization`` derives from its variables is computed again. A
    vocabulary or the like is no variable; if the ranks' differ, an error names the layer.

    Layers of one rank alone (``hvd.PartialDistributedOptimizer``, ``register_local_var``) keep
    their values.

    At the end of each epoch, before validation and checkpoints, the moving statistics of batch
    normalisation become the mean over the ranks; until then each rank's are those of its own
    batches. Use ``hvd.SyncBatchNormalization`` for statistics that are those of one process.

    Where XLA cannot compile the collectives (``libhvd_xla.so`` is missing or does not load), the
    model trains without it, with a warning: ``jit_compile``, which Keras turns on by itself on
    machines with GPUs, is turned off. Elsewhere it stays as it is, on GPUs too, where the
    collectives in XLA's programs have been tested with a stand-in for CUDA and NCCL only
    (docs/gpu.md); ``model.compile(jit_compile=False)`` does without XLA.

    What ``Checkpoint`` has restored stays as it is, whichever of the two comes first.

    Each ``fit`` begins with a broadcast; one instance may serve several models.

    Args:
        root_rank: the rank whose state all get.

    Raises:
        ValueError: (in ``fit``) there is no such rank among those that train the model, or the
            model's step cannot be traced to make its variables, or the ranks' models or
            vocabularies differ; on every rank.

    Example:
        model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._epoch_runs = False

    def set_model(self, model: Any) -> None:
        """Turns XLA off where it cannot compile the collectives."""
        super().set_model(model)
        if model.jit_compile and (problem := xla.problem()):
            model.jit_compile = False
            _warn_once(problem)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """After the model got its variables."""
        process_set = self.process_set
        check_root(self.root_rank, process_set)
        if variables.is_restored(self.model):
            return
        if process_set.size() == 1:
            if building.is_built(self.model):
                variables.of_training(self.model)  # builds the optimizer, as on several ranks
            return
        fitting.check_built(self.model)
        layers = list(self.model._flatten_layers())
        preprocessing.check_equal_on_all_ranks(layers, process_set, self.root_rank)
        # Without the optimizer's, whose names contain Keras's numbers in other places.
        specs = map(exchange.spec_of, self.shared(self.model.variables))
        exchange.check_specs("broadcast", list(specs), process_set)
        shared = self.shared(variables.of_training(self.model))
        variables.broadcast_variables(shared, self.root_rank, process_set)
        if preprocessing.refresh_derived_values(layers):
            fitting.forget_functions(self.model)  # in which the old values are constants
        seeds = self.shared(variables.seed_states(layers))
        variables.give_each_rank_its_own_randomness(seeds, process_set)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """From Keras."""
        self._epoch_runs = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """At the last batch of an epoch: before other callbacks save or evaluate the model."""
        steps = self.params.get("steps")
        if steps is not None and batch + 1 >= steps:  # steps_per_execution may count beyond
            self._average_moving_statistics()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """For data of unknown length, where this rank has a validation."""
        self._average_moving_statistics()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """For data of unknown length, where this rank has no validation."""
        self._average_moving_statistics()

    def _average_moving_statistics(self) -> None:
        """Once per epoch on each rank, whether it knows its end beforehand or not."""
        if not self._epoch_runs:
            return
        self._epoch_runs = False
        statistics = variables.moving_statistics(self.model._flatten_layers())
        variables.average_variables(self.shared(statistics), self.process_set)

    def shared(self, variables: Iterable[Any]) -> list[Any]:
        """Of some variables those that all ranks have in common."""
        return reducer.without_local(self.model, variables)


@functools.cache
def _warn_once(problem: str) -> None:
    if rank_info.local_rank() == 0:
        log.logger.warning("models train without XLA (jit_compile=False): %s", problem)
