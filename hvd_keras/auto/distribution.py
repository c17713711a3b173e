"""``keras.distribution`` on TensorFlow, where Keras has none: each rank is a device.

``DataParallel`` means what automatic mode does to every model, so it changes nothing. This module
takes the place of the backend's, whose functions ``keras.distribution`` calls.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.runtime import rank_info

# Of the data Keras divides nothing: every rank has it as a whole, and all variables.
num_processes, process_id = lambda: 1, lambda: 0
distribute_value = distribute_variable = distribute_tensor = lambda value, layout: value
_to_backend_mesh = _to_backend_layout = lambda of_keras: of_keras


def initialize(
    job_addresses: Any = None, num_processes: Any = None, process_id: Any = None
) -> None:
    """Check that the script asks for the ranks that hvdrun has started; they are connected."""
    rank, size = rank_info.rank(), rank_info.size()
    if num_processes not in (None, size) or process_id not in (None, rank):
        raise ValueError(
            f"keras.distribution.initialize: got {num_processes=}, {process_id=} on rank {rank} of "
            f"{size}. Leave the arguments out: hvdrun -np N starts the processes."
        )


def list_devices(device_type: str | None = None) -> list[str]:
    """Return a name for each rank's device, such as "cpu:0"."""
    # hvd.init() has given each rank one GPU, if there are any.
    own = "gpu" if tf.config.list_logical_devices("GPU") else "cpu"
    wanted = (device_type or own).lower()
    return [f"{wanted}:{r}" for r in range(rank_info.size()) if wanted in ("cpu", own)]


def get_device_count(device_type: str | None = None) -> int:
    """Return their number."""
    return len(list_devices(device_type))


def make_data_parallel(make: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DataParallel.__init__``: its devices must be those of all ranks."""
    make(self, *args, **kwargs)
    if self.device_mesh.devices.size != rank_info.size():
        raise ValueError(
            f"keras.distribution.DataParallel: got {self.device_mesh.devices.size} as number of "
            f"devices, expected those of all {rank_info.size()} ranks. Leave the devices out."
        )


def refuse_model_parallel(*args: Any, **kwargs: Any) -> None:
    """Replace ``ModelParallel.__init__``."""
    raise ValueError(
        "keras.distribution.ModelParallel divides variables, and hvdrun --auto batches only. Use "
        "keras.distribution.DataParallel(); for large tables without --auto, hvd.layers.Embedding."
    )
