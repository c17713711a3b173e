"""Horovod's callbacks where their arguments differ from those of ``hvd_keras.callbacks``."""

from collections.abc import Iterable
from typing import Any

from hvd_keras import callbacks
from hvd_keras.training import exchange


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback):  # type: ignore[misc]
    """``hvd_keras.callbacks.BroadcastGlobalVariablesCallback``.

    Args:
        root_rank: the rank whose state all get.
        device: not needed: TensorFlow chooses.
        local_variables: variables that keep their values, besides those registered as local.

    Raises:
        As ``hvd_keras.callbacks.BroadcastGlobalVariablesCallback``.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__(root_rank)
        self._local = {exchange.variable_id(v): v for v in local_variables or ()}

    def shared(self, variables: Iterable[Any]) -> list[Any]:
        """Of some variables those that all ranks have in common."""
        return [v for v in super().shared(variables) if exchange.variable_id(v) not in self._local]


class MetricAverageCallback(callbacks.MetricAverageCallback):  # type: ignore[misc]
    """``hvd_keras.callbacks.MetricAverageCallback``.

    Args:
        device: not needed: TensorFlow chooses.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
