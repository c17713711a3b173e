"""Horovod's functions that tell what the library was built with."""

import tensorflow as tf

from hvd_keras import _library, gpu


def mpi_built() -> bool:
    """Whether MPI is there: always."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is used: always."""
    return True


def mpi_threads_supported() -> bool:
    """Whether other threads may use MPI as well: always, ``init()`` requires it."""
    return True


def nccl_built() -> int:
    """The version of the NCCL that was found, as NCCL numbers it (22703: 2.27.3); 0: none."""
    gpu.find_libraries()
    return int(_library.core().hvd_nccl_version())


def cuda_built() -> bool:
    """Whether this TensorFlow can use GPUs of NVIDIA."""
    return bool(tf.test.is_built_with_cuda())


def gloo_built() -> bool:
    """Whether Gloo is there: never, MPI and shared memory replace it."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo is used: never."""
    return False


def ddl_built() -> bool:
    """Whether IBM's DDL is there: never."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL is there: never."""
    return False


def rocm_built() -> bool:
    """Whether AMD's GPUs are supported: no."""
    return False
