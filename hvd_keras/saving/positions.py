"""Where the ranks are in their data, in a checkpoint: saved if possible, or by skipping batches."""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_keras.runtime import agree, log
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.saving import per_rank, storage

if TYPE_CHECKING:
    from hvd_keras.training.fit_state import Fit

_BYTES = 1 << 26  # of all ranks

_AGAIN = (
    "data that repeat begin anew, and others are read again from the epoch's beginning, without "
    "training on them"
)


class Positions:
    """Saves and restores them, on all ranks together.

    Args:
        fit: whose data these are.
        process_set: its ranks.
        steps: how many of an epoch are read again after a restart; "": none.
    """

    def __init__(self, fit: "Fit", process_set: ProcessSet, steps: Any) -> None:
        self._process_set, self._goes_on = process_set, fit.goes_on
        problem = "" if fit.position is None else fit.position.problem()
        mine = [fit.position is not None and not problem, problem]
        gathered = agree.gather_json("checkpoint position", mine, process_set)
        self._position: Any = fit.position if all(is_saved for is_saved, _ in gathered) else None
        if self._position is None and (steps or fit.goes_on) and process_set.rank() == 0:
            what = (
                "will begin the data anew: its passes end within the epochs of fit"
                if fit.goes_on
                else f"within an epoch will read the epoch's batches before that, up to {steps}, "
                "again, without training on them: the data can only be read from the beginning"
            )
            kinds = ", ".join(sorted({problem for _, problem in gathered if problem}))
            why = f", because TensorFlow cannot save the position in {kinds}" * bool(kinds)
            log.logger.warning(
                "Checkpoint: a restart %s%s. Data of hvd.data.shard, and of its repeat() without "
                "a number, can begin anywhere if made of arrays, a PyDataset, hvd.data.files, or a "
                "tf.data.Dataset without Python functions, generators and cache. With "
                "save_freq='epoch' and without steps_per_epoch nothing is read twice.",
                *(what, why),
            )

    def save(self, batch: int) -> list[storage.Variable]:
        """Return what the first rank writes of them before this batch of an epoch."""
        # An epoch's end needs none, unless the data go on with the next.
        if self._position is None or not (batch or self._goes_on):
            return []
        own, mine = self._process_set, self._position.save()
        size = sum(agree.gather_json("checkpoint position size", len(mine), own))
        if size > _BYTES:
            self._position = None
            if own.rank() == 0:
                log.logger.warning(
                    "Checkpoint: what tf.data has read ahead takes %s MB on all ranks, expected "
                    "%s or less, so it is not saved. After a restart, %s. Make the buffer of "
                    "shuffle() smaller, or use hvd.data.files.",
                    *(size >> 20, _BYTES >> 20, _AGAIN),
                )
            return []
        found = agree.gather_bytes("checkpoint positions", mine, own, to_leader=True)
        longest = max(map(len, found), default=0)
        rows = [np.frombuffer(one.ljust(longest, b"\0"), np.uint8) for one in found]
        return [storage.Variable(per_rank.POSITION, True, np.stack(rows))] if rows else []

    def restore(self, ranks: int, stored: Any, value: Any) -> bool:
        """Let the data go on where each rank was; return whether they do.

        ``value``, on the first rank, was saved by so many ranks, and has the shape ``stored[1]``.
        """
        own = self._process_set
        if self._position is None or stored is None:
            return False
        if ranks == own.size():
            _, shape, dtype, _ = stored
            saved = per_rank.to_all_ranks((ranks, *shape), dtype, value, own)[own.rank()].tobytes()
            if all(agree.gather_json("checkpoint data", self._position.fits(saved), own)):
                self._position.restore(saved)
                return True
        if own.rank() == 0:
            warnings.warn(
                f"Checkpoint: the position of {ranks} ranks in their data does not fit: now there "
                f"are {own.size()}, or the data are made in another way. So {_AGAIN}.",
                stacklevel=5,
            )
        return False
