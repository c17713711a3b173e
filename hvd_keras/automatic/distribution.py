"""``keras.distribution`` on TensorFlow, where Keras has none: each rank is a device.

``DataParallel`` means what automatic mode does to every model, so it changes nothing: batches are
divided in the steps. This takes the place of the backend's module, whose functions
``keras.distribution`` calls.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.runtime import rank_info


class Devices:
    """The functions that ``keras.distribution`` needs of a backend; each rank is one device."""

    @staticmethod
    def initialize(
        job_addresses: Any = None, num_processes: Any = None, process_id: Any = None
    ) -> None:
        """Check that the script asks for the ranks that hvdrun has started; they are connected."""
        size = rank_info.size()
        if num_processes not in (None, size) or process_id not in (None, rank_info.rank()):
            raise ValueError(
                f"keras.distribution.initialize: got {num_processes=}, {process_id=} on rank "
                f"{rank_info.rank()} of {size}. Leave the arguments out: hvdrun -np N starts the "
                "processes."
            )

    @staticmethod
    def list_devices(device_type: str | None = None) -> list[str]:
        """Return a name for each rank's device, such as "cpu:0"."""
        # hvd.init() has given each rank one GPU, if there are any.
        own = "gpu" if tf.config.list_logical_devices("GPU") else "cpu"
        wanted = (device_type or own).lower()
        return [f"{wanted}:{r}" for r in range(rank_info.size()) if wanted in ("cpu", own)]

    @classmethod
    def get_device_count(cls, device_type: str | None = None) -> int:
        """Return their number."""
        return len(cls.list_devices(device_type))

    # Of the data Keras divides nothing: every rank has it as a whole, and all variables.
    num_processes = staticmethod(lambda: 1)
    process_id = staticmethod(lambda: 0)
    distribute_value = distribute_variable = distribute_tensor = staticmethod(lambda x, layout: x)
    _to_backend_mesh = _to_backend_layout = staticmethod(lambda of_keras: of_keras)


def make_data_parallel(make: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DataParallel.__init__``: its devices must be those of all ranks."""
    make(self, *args, **kwargs)
    if self.device_mesh.devices.size != rank_info.size():
        raise ValueError(
            f"keras.distribution.DataParallel: got {self.device_mesh.devices.size} as number of "
            f"devices, expected those of all {rank_info.size()} ranks, each one device. Leave the "
            "devices out, or start as many ranks: hvdrun -np N."
        )


def refuse_model_parallel(*args: Any, **kwargs: Any) -> None:
    """Replace ``ModelParallel.__init__``."""
    raise ValueError(
        "keras.distribution.ModelParallel divides variables, and hvdrun --auto divides batches "
        "only: each rank has all variables. Use keras.distribution.DataParallel(); for large "
        "tables without --auto, hvd.layers.Embedding."
    )
