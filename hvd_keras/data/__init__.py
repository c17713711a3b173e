"""``hvd.data``: every row is used once, and every rank makes the same number of steps."""

import importlib
from typing import Any

from hvd_keras.runtime import settings

__all__ = ["agree_on_steps", "files", "shard"]


def __getattr__(name: str) -> Any:
    # The parts that no framework is needed for are imported without one.
    if name not in __all__:
        raise AttributeError(f"module 'hvd_keras.data' has no attribute {name!r}")
    on_torch = settings.keras_backend() == "torch"
    home = "hvd_keras.torch.data" if on_torch else "hvd_keras.data.tensorflow.sharding"
    return getattr(importlib.import_module(home), name)
