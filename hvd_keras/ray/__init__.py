"""hvd_keras on Ray: ``hvd.ray.run`` and ``hvd.ray.TrainConfig`` for Ray Train.

Needs ``pip install "ray[train]"``. Ray is imported only when it is used.
"""

from typing import Any

from hvd_keras.ray.run import run

__all__ = ["TrainConfig", "run"]


def __getattr__(name: str) -> Any:
    if name == "TrainConfig":
        from hvd_keras.ray.train import TrainConfig

        return TrainConfig
    raise AttributeError(f"module 'hvd_keras.ray' has no attribute {name!r}")
