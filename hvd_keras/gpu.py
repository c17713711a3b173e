"""This process's GPU: which it is, and where the libraries for it are."""

import pathlib
import sys

import tensorflow as tf

from hvd_keras import _library, settings


def find_libraries() -> None:
    """Tells the core of the folders in which NVIDIA's wheels put libcudart and libnccl."""
    folders = {
        str(folder)
        for path in sys.path
        for kind in ("cuda_runtime", "nccl", "cu13")
        if (folder := pathlib.Path(path) / "nvidia" / kind / "lib").is_dir()
    }
    _library.core().hvd_gpu_folders(":".join(sorted(folders)).encode())


def pin(local_rank: int, local_size: int) -> None:
    """Gives this process the GPU of its local rank, with memory growth, unless the user chose.

    Raises:
        RuntimeError: the host has fewer GPUs than processes, or TensorFlow has already taken all.
    """
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
                    "hvd.init: TensorFlow has already taken all GPUs, and this process needs one "
                    "alone. Call hvd.init() before anything that makes a tensor, or choose with "
                    f"tf.config.set_visible_devices. ({error})"
                ) from error
        visible = [gpu]
    if visible:
        _library.core().hvd_use_gpu(gpus.index(visible[0]))


def choose(gpus: int, local_rank: int, local_size: int, chosen: settings.Settings) -> int:
    """The number of the GPU of a process, among those that it sees.

    Args:
        gpus: how many it sees, at least 1.
        local_rank: its number among the processes of its host.
        local_size: how many they are.
        chosen: the settings.

    Raises:
        RuntimeError: there are fewer GPUs than processes.
    """
    if gpus >= local_size:
        return local_rank
    if gpus == 1 and chosen.some_gpus_hidden:
        return 0  # each process sees its own; if not, NCCL's first use says so
    if chosen.gpus_by_mpi:
        return local_rank % gpus
    raise RuntimeError(
        f"hvd.init: this host has {gpus} GPUs for {local_size} processes. Start as many processes "
        "as there are GPUs (hvdrun -np), or set HVD_GPU_OPERATIONS=MPI to share "
        "them: collectives then go through the host's memory."
    )


def facts() -> dict[str, str]:
    """What there is of CUDA and NCCL, and what is missing, in words."""
    find_libraries()
    core = _library.core()
    return {"CUDA": core.hvd_cuda().decode(), "NCCL": core.hvd_nccl().decode()}
