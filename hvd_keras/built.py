"""Horovod's questions about what the library was built with."""


def mpi_built() -> bool:
    """Whether MPI is there: always."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is used: always."""
    return True


def mpi_threads_supported() -> bool:
    """Whether other threads may use MPI, too: always, ``init()`` sees to that."""
    return True


def nccl_built() -> int:
    """The version of NCCL; 0: tensors of GPUs go over the host."""
    return 0


def cuda_built() -> bool:
    """Whether tensors of GPUs stay on them: not yet."""
    return False


def gloo_built() -> bool:
    """Whether Gloo is there: never, MPI and shared memory are in its place."""
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
    """Whether tensors of AMD's GPUs stay on them: no."""
    return False
