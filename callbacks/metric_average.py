"""Same metrics on all ranks."""

from typing import Any

import keras

from hvd_keras import agree


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces an epoch's metrics by their mean over the ranks.

    The mean is not weighted, so it is that of one process if all ranks see as many samples, and
    only for metrics that are means themselves (losses, accuracies; not AUC).

    Put it before callbacks that read metrics (``ReduceLROnPlateau``, ``EarlyStopping``, loggers):
    they then see the same values, and decide the same, on all ranks.

    Raises:
        ValueError: (in ``fit``) the ranks log different metrics, such as ``val_loss`` on one rank
            only; on every rank.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Changes ``logs`` in place."""
        if not logs:
            logs = {}
        mine = {key: float(value) for key, value in logs.items() if _is_number(value)}
        everyone = agree.gather_json("metrics", mine)
        if any(set(theirs) != set(mine) for theirs in everyone):
            names = ", ".join(f"rank {r}: {sorted(theirs)}" for r, theirs in enumerate(everyone))
            raise ValueError(
                f"MetricAverageCallback: the ranks log different metrics ({names}). "
                "Give all ranks the same metrics and validation data."
            )
        for key in mine:
            logs[key] = sum(theirs[key] for theirs in everyone) / len(everyone)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
