"""``load_model``: loads a saved model to continue its training."""

import os
from collections.abc import Iterable
from typing import Any

from hvd_keras._keras import keras
from hvd_keras.ops.compression import Compression, Compressor
from hvd_keras.training.optimizer import DistributedOptimizer, is_distributed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
) -> keras.Model:
    """``keras.models.load_model``, with the optimizer wrapped in ``DistributedOptimizer``.

    The optimizer keeps the state of the file, so training continues where it was. Every rank reads
    the file.

    Args:
        filepath: a file that ``model.save`` has written, on one process or on several.
        custom_optimizers: optimizer classes of your own that the file may name.
        custom_objects: other classes and functions that the file may name; a function that makes
            an optimizer may call ``DistributedOptimizer`` itself.
        compression: as in ``DistributedOptimizer``.

    Returns:
        The model.

    Raises:
        ValueError: the file is missing, or has no optimizer.

    Example:
        model = hvd.load_model("checkpoints/model.keras")
        model.fit(x, y)
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{filepath} has no optimizer: the model was saved before compile(), or for inference. "
            "Use keras.models.load_model, then compile() with a hvd.DistributedOptimizer."
        )
    if not is_distributed(getattr(model.optimizer, "inner_optimizer", model.optimizer)):
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
