"""Same state on all ranks."""

import functools
from typing import Any

from hvd_keras import log, rank_info, variables, xla
from hvd_keras._keras import keras


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's model and optimizer state before the first step.

    Weights, moving statistics, optimizer slots, iteration counts and the learning rate become
    equal. Random generators (dropout, augmentation) get the root's seed mixed with the rank: every
    rank draws other masks, and a rerun draws the same ones again.

    At the end of each epoch, before validation and checkpoints, the moving statistics of batch
    normalisation become the mean over the ranks; until then each rank's are those of its own
    batches. (Where ``fit`` does not know the number of batches, that is after validation.) Use
    ``hvd.SyncBatchNormalization`` for statistics that are those of one process.

    Where XLA cannot compile the collectives (``libhvd_xla.so`` is missing or does not load), the
    model trains without it, with a warning: ``jit_compile``, which Keras turns on by itself on
    machines with GPUs, is turned off. Elsewhere it stays as it is, on GPUs too, where the
    collectives in XLA's programs have been tested with a stand-in for CUDA and NCCL only
    (docs/gpu.md); ``model.compile(jit_compile=False)`` does without XLA.

    What ``Checkpoint`` has restored stays as it is, whichever of the two comes first.

    Broadcasts once; a later ``fit`` with the same instance does not repeat it.

    Args:
        root_rank: the rank whose state all get.

    Raises:
        ValueError: (in ``fit``) there is no such rank.
        tf.errors.FailedPreconditionError: (in ``fit``) the ranks' models differ; on every rank.

    Example:
        model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._done = False

    def set_model(self, model: Any) -> None:
        """Turns XLA off where it cannot compile the collectives."""
        super().set_model(model)
        if model.jit_compile and (problem := xla.problem()):
            model.jit_compile = False
            _warn_once(problem)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """After Keras has built the model."""
        if self._done:
            return
        self._done = True
        if variables.is_restored(self.model):
            return
        variables.broadcast_variables(variables.of_training(self.model), self.root_rank)
        if rank_info.size() > 1:
            layers = self.model._flatten_layers()
            variables.give_each_rank_its_own_randomness(variables.seed_states(layers))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """At the last batch of an epoch: validation comes before ``on_epoch_end``."""
        steps = self.params.get("steps")
        if steps is not None and batch + 1 >= steps:  # steps_per_execution may count beyond
            self._average_moving_statistics()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """For data of unknown length."""
        if self.params.get("steps") is None:
            self._average_moving_statistics()

    def _average_moving_statistics(self) -> None:
        variables.average_variables(variables.moving_statistics(self.model._flatten_layers()))


@functools.cache
def _warn_once(problem: str) -> None:
    if rank_info.local_rank() == 0:
        log.logger.warning("models train without XLA (jit_compile=False): %s", problem)
