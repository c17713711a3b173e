"""Selects this process's GPU, finds the libraries for it, and says what is supported."""

import pathlib
import sys

from hvd_keras.runtime import libraries, log, settings


def find_libraries() -> None:
    """Tells the core where NVIDIA's wheels and AMD's packages install their libraries."""
    folders = {
        str(folder)
        for path in sys.path
        for kind in ("cuda_runtime", "nccl", "cu13")
        if (folder := pathlib.Path(path) / "nvidia" / kind / "lib").is_dir()
    }
    if (rocm := pathlib.Path("/opt/rocm/lib")).is_dir():
        folders.add(str(rocm))
    libraries.core().hvd_gpu_folders(":".join(sorted(folders)).encode())


def pin(local_rank: int, local_size: int) -> None:
    """Give this process the GPU of its local rank, with memory growth.

    Does nothing if the user has called ``tf.config.set_visible_devices``.

    Raises:
        RuntimeError: the host has fewer GPUs than processes, or TensorFlow has already taken all.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    visible = tf.config.get_visible_devices("GPU")
    if visible == gpus:
        gpu = gpus[choose(len(gpus), local_rank, local_size, settings.read())]
        try:
            tf.config.set_visible_devices(gpu, "GPU")
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError as error:
            if len(gpus) > 1:
                raise RuntimeError(
                    "hvd.init: TensorFlow has already taken all GPUs, but each process needs its "
                    "own. Call hvd.init() before anything that creates a tensor, or select one "
                    f"with tf.config.set_visible_devices. ({error})"
                ) from error
        visible = [gpu]
    if visible:
        libraries.core().hvd_use_gpu(gpus.index(visible[0]))


def choose(gpus: int, local_rank: int, local_size: int, chosen: settings.Settings) -> int:
    """Return the index of a process's GPU among the ``gpus`` that it sees, at least 1."""
    if gpus >= local_size:
        return local_rank
    count = f"{gpus} GPU{'s' * (gpus > 1)}"
    if chosen.gpus_shared:
        if local_rank == 0:
            log.warn_once(
                f"{local_size} processes share {count}, which tests a script but does not speed it "
                "up. To train on CPUs, set CUDA_VISIBLE_DEVICES=-1."
            )
        return local_rank % gpus
    if gpus == 1 and chosen.some_gpus_hidden:
        return 0  # each process sees its own; otherwise NCCL's first use is an error
    raise RuntimeError(
        f"hvd.init: this host has {count} for {local_size} processes, and two cannot share one by "
        f"default. Start one process per GPU (hvdrun -np {gpus}), or set CUDA_VISIBLE_DEVICES=-1 "
        "to train on CPUs. To share GPUs, set HVD_GPU_OPERATIONS=MPI: collectives then go through "
        "the host's memory; or, with NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1."
    )


def facts() -> dict[str, str]:
    """Describe the CUDA and NCCL libraries that were found, or what is missing."""
    find_libraries()
    core = libraries.core()
    return {"CUDA": core.hvd_cuda().decode(), "NCCL": core.hvd_nccl().decode()}


def mpi_built() -> bool:
    """Return True: MPI is available, is used, and by any thread, because ``init()`` requires it."""
    return True


mpi_enabled = mpi_threads_supported = mpi_built


def nccl_built() -> int:
    """The version of the NCCL that was found, in NCCL's format (22703 is 2.27.3); 0: none."""
    find_libraries()
    return int(libraries.core().hvd_nccl_version())


def cuda_built() -> bool:
    """Whether this TensorFlow supports NVIDIA's GPUs."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())


def gloo_built() -> bool:
    """Return False: MPI and shared memory replace Gloo, IBM's DDL and oneCCL."""
    return False


gloo_enabled = ddl_built = ccl_built = gloo_built


def rocm_built() -> bool:
    """Whether this TensorFlow supports AMD's GPUs."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_rocm())
