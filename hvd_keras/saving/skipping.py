"""What ``fit`` does with batches that the model has seen before a restart."""

from typing import Any

import numpy as np

from hvd_keras.gradients import shards
from hvd_keras.saving import per_rank


class Skipping:
    """Lets ``fit`` pass over the batches that the model has seen, without training on them.

    It reads them, unless the data begin behind them.

    Other callbacks are called for these batches, so that their counters are right. Their changes to
    the model are undone when the position of the checkpoint is reached.
    """

    def __init__(self, model: Any, own: list[Any], batches: int, reads: bool) -> None:
        self.batches = batches
        self._reads = reads
        self._passed = 0
        self._model = model
        self._own = shards.without(own)  # a copy of the tables might not fit
        self._values = [np.asarray(variable).copy() for variable in self._own]
        self._random = per_rank.random_state()
        self._train_function = model.train_function
        model.train_function = self._skip

    def _skip(self, iterator: Any) -> Any:
        if self._passed >= self.batches:  # an earlier fit broke off before stop()
            return self._train_function(iterator)
        self._passed += self._model.steps_per_execution
        if not self._reads or isinstance(iterator, list):  # batches that fit has read, on PyTorch
            return {}
        next(iterator)  # raises at the end of the data, as Keras's function does
        for _ in range(1, self._model.steps_per_execution):
            next(iterator, None)
        return {}

    def put_back(self) -> None:
        for variable, value in zip(self._own, self._values, strict=True):
            variable.assign(value)
        per_rank.set_random_state(self._random)

    def stop(self) -> None:
        self._model.train_function = self._train_function
