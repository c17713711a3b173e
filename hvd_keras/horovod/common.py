"""What ``horovod.common`` has: exceptions, and questions about the build."""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class HorovodInternalError(RuntimeError):
    """Horovod's error of a failed collective. hvd_keras ends the process instead."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """Horovod's signal that hosts were added or removed. hvd_keras starts the job again instead.

    Args:
        skip_sync: whether the state needs no broadcast.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod's error of a build for another framework. hvd_keras raises RuntimeError instead."""


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raises ImportError unless a framework is supported.

    Args:
        ext_name: such as "horovod.tensorflow".
        ext_env_var, pkg_path, args: not needed.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not there: hvd_keras has horovod.tensorflow and .keras.")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("tensorflow", "keras", "torch", …) is supported."""
    return ext_base_name in ("tensorflow", "keras")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether TensorFlow sees GPUs here."""
    return extension_available(ext_base_name) and bool(tf.config.list_physical_devices("GPU"))


def sycl_built() -> bool:
    """Whether Intel's GPUs are supported: no."""
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Splits a list into parts whose lengths differ by at most 1; the first ones are longer."""
    least, longer = divmod(len(items), parts)
    ends = [least * i + min(i, longer) for i in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]
