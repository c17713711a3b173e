"""``VerifyWeights``: finds the rank whose hardware has changed a weight."""

from typing import Any

from hvd_keras.callbacks.base import Callback

from hvd_keras.runtime import agree
from hvd_keras.training import fit_state


class VerifyWeights(Callback):  # type: ignore[misc]
    """Compares the weights of all ranks, and ends the training if a bit differs.

    The error names the ranks that differ from most others, with their hosts, such as one whose
    memory or processor is faulty. Two ranks have no majority that tells which. Put it before
    ``Checkpoint``: then a checkpoint has verified weights, with which a restart goes on.

    On GPUs, TensorFlow adds the rows of sparse gradients, such as those of embeddings, in any
    order, and XLA may choose other kernels on each rank, so last bits differ. Pass
    ``sparse_as_dense=True`` to the optimizer, or call
    ``tf.config.experimental.enable_op_determinism()``.

    It compares a checksum of each value that is equal on all ranks, also at the end of each epoch:
    weights, learning rate and counters, but no moving statistics and parts of tables. It does not
    find what is equal on all ranks again by then, such as NaN after a weight became infinite. On
    one rank it does nothing.

    Args:
        every: the number of batches after which to compare. Each time reads all weights once.

    Raises:
        ValueError: ``every`` is no positive integer. In ``fit``, on every rank: it differs.
        RuntimeError: (in ``fit``, on every rank) the weights differ.

    Example:
        data = hvd.data.shard((x, y), batch_size=32)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        verify, checkpoint = hvd.callbacks.VerifyWeights(100), hvd.callbacks.Checkpoint("saved")
        model.fit(data, callbacks=[broadcast, verify, checkpoint])
    """

    _hvd_communicates = True

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"VerifyWeights: every is {every!r}, expected a positive integer.")
        self.every = every
        self._epoch = self._batches = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if fit_state.running(self.model) is not None:
            gathered = agree.gather_json("VerifyWeights", self.every, self.process_set)
            if len(set(gathered)) > 1:
                views = agree.by_rank(gathered, self.process_set)
                raise ValueError(f"VerifyWeights: every differs by rank: {views}.")
        self._equal = "the beginning"

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._batches = epoch, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        before, self._batches = self._batches, batch + 1
        # steps_per_execution may step over a multiple.
        if self._batches // self.every > before // self.every:
            self._verify()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._verify()

    def _verify(self) -> None:
        fit = fit_state.running(self.model)
        if fit is None or fit.values is None:
            return
        now = f"batch {self._batches} of epoch {self._epoch + 1}"
        if different := fit.values.different("VerifyWeights compares", bit_by_bit=True):
            what, odd = different
            alone = fit.values.alone and f" (not all ranks have the same: {fit.values.alone})"
            raise RuntimeError(
                f"VerifyWeights: after {now} the values of {what} differ, on "
                f"{odd or 'ranks without a majority that tells which is wrong'}. They were equal "
                f"after {self._equal}. Either memory or a processor there is faulty, or a "
                f"callback{alone}, train_step or layer assigns what depends on the rank, or a GPU "
                "adds the rows of sparse gradients in any order (set sparse_as_dense=True). To go "
                "on, leave out the host and restart from a checkpoint before this."
            )
        self._equal = now
