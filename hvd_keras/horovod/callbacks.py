"""Horovod's callbacks where their arguments differ from those of ``hvd_keras.callbacks``."""

from collections.abc import Iterable
from typing import Any

from hvd_keras import callbacks
from hvd_keras.runtime.keras import keras


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback):  # type: ignore[misc]
    """``hvd_keras.callbacks.BroadcastGlobalVariablesCallback``.

    Args:
        root_rank: the rank whose state all get.
        device: not needed: TensorFlow chooses.
        local_variables: as in ``hvd_keras.callbacks``.

    Raises:
        As ``hvd_keras.callbacks.BroadcastGlobalVariablesCallback``.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__(root_rank, local_variables)


class MetricAverageCallback(callbacks.MetricAverageCallback):  # type: ignore[misc]
    """``hvd_keras.callbacks.MetricAverageCallback``.

    Args:
        device: not needed: TensorFlow chooses.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint(save_best_only=True)`` without a path.

    Horovod's Spark estimators set the path; without them, set ``callback.filepath``.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as in Keras.

    Raises:
        ValueError: (in ``fit``) there is no path.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(
            "best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """From Keras."""
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint: filepath is None, and no Spark estimator sets it here. Set "
                "it before fit: callback.filepath = 'best.keras'."
            )
        super().on_train_begin(logs)
