"""Horovod's functions about the features of its build."""

import tensorflow as tf

from hvd_keras.runtime import gpu, libraries


def mpi_built() -> bool:
    """Whether MPI is available: always True."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is used: always True."""
    return True


def mpi_threads_supported() -> bool:
    """Whether other threads may use MPI, too: always True, because ``init()`` requires it."""
    return True


def nccl_built() -> int:
    """The version of the NCCL that was found, in NCCL's format (22703 is 2.27.3); 0: none."""
    gpu.find_libraries()
    return int(libraries.core().hvd_nccl_version())


def cuda_built() -> bool:
    """Whether this TensorFlow supports NVIDIA's GPUs."""
    return bool(tf.test.is_built_with_cuda())


def gloo_built() -> bool:
    """Whether Gloo is available: always False; MPI and shared memory replace it."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo is used: always False."""
    return False


def ddl_built() -> bool:
    """Whether IBM's DDL is available: always False."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL is available: always False."""
    return False


def rocm_built() -> bool:
    """Whether AMD's GPUs are supported: always False."""
    return False
