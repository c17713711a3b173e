"""Finds and loads the native libraries: the core (ctypes), the TensorFlow ops, and XLA's."""

import ctypes
import functools
import os.path
import pathlib
from collections.abc import Callable
from typing import Any

import hvd_keras
from hvd_keras.runtime import mpi_library, settings

try:
    import hvd_keras._build_info
except ImportError as error:
    raise ImportError(
        "hvd_keras has no native libraries here: it was not built. Run 'pip install .' (or "
        "'pip install -e .') in its source folder."
    ) from error


# What the core returns for an invalid argument, see Code in native/core/base/status.h.
INVALID_ARGUMENT = 3

_BUILD = "python -m hvd_keras.build"


def search(name: str) -> str | None:
    """Return the path of a file of the package that matches a pattern, if there is one."""
    # An editable installation has two folders: the sources, and what was built.
    for folder in hvd_keras.__path__:
        for path in sorted(pathlib.Path(folder).glob(name)):
            return str(path)
    return None


def _find(name: str) -> str:
    if path := search(name):
        return path
    raise RuntimeError(
        f"{name} was not found in {list(hvd_keras.__path__)}. Run 'pip install .' in the source "
        "folder of hvd_keras again and look for errors of the build."
    )


@functools.cache
def core() -> ctypes.CDLL:
    """Return the core: the engine and the transports, without TensorFlow.

    One process that no launcher has started needs no MPI; others get a RuntimeError without one.
    """
    try:
        abi, mpi = mpi_library.load()
    except mpi_library.NotFoundError as error:
        if settings.is_launched():
            raise RuntimeError(str(error)) from None
        mpi = mpi_library.Library(_find("native/alone/libmpi.so.*"), "for one process")
        abi = mpi.abi
        ctypes.CDLL(mpi.path)
    if abi == "mpich" and not os.path.basename(mpi.path).startswith("libmpi.so"):
        ctypes.CDLL(_find("native/mpich/libmpi.so.12"))  # the name that the core asks for
    path = search(f"native/{abi}/libhvd_core.so")
    if path is None:
        kind = "Open MPI's ABI" if abi == "openmpi" else "MPICH's ABI"
        raise RuntimeError(
            f"hvd_keras was built for another ABI than that of {mpi.path} ({mpi.origin}), which "
            f"has {kind}. Set HVD_MPI_LIBRARY to the MPI library that hvd_keras was built for, or "
            "rebuild it with HVD_MPICXX set to this MPI's mpicxx."
        )
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(
            f"The core of hvd_keras does not load with {mpi.path} ({mpi.origin}): {error}"
        ) from error
    text, integer, pointer = ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p
    numbers = ctypes.POINTER(integer)
    for name in ("error", "mpi_version", "mpi_file", "stats", "cuda", "nccl"):
        getattr(library, f"hvd_{name}").restype = text
    library.hvd_rank_info.argtypes = [numbers]
    library.hvd_init.argtypes = [numbers, integer, pointer, ctypes.c_double]
    library.hvd_add_process_set.argtypes = [integer, numbers, integer]
    library.hvd_leave.argtypes = [text, ctypes.c_double]
    library.hvd_gpu_folders.argtypes = [text]
    library.hvd_submit.argtypes = [pointer, pointer, integer, pointer]
    library.hvd_submit.restype = pointer
    library.hvd_wait.argtypes = library.hvd_release.argtypes = [pointer]
    library.hvd_result.argtypes = [pointer, integer, pointer, pointer]
    return library


# TensorFlow's exceptions, by the codes of the core's Status.
_ERRORS = {
    INVALID_ARGUMENT: "InvalidArgumentError",
    4: "DeadlineExceededError",
    9: "FailedPreconditionError",
    10: "AbortedError",
}


#: Makes an exception of the name of one of TensorFlow's and a text; None: TensorFlow's own.
make_error: Callable[[str, str], Exception] | None = None


def exception_of(code: int, text: str) -> Exception:
    """Return the exception that a code of the core stands for."""
    name = _ERRORS.get(code, "InternalError")
    if make_error is not None:
        return make_error(name, text)
    import tensorflow as tf

    kind: type[Exception] = getattr(tf.errors, name)
    return kind(None, None, text)


def mpi_file() -> str:
    """The path of the MPI library, by a name that mpi4py accepts (see native/CMakeLists.txt).

    Empty without one, if this process is alone.
    """
    # The core is loaded first: ctypes binds all of MPI's symbols at once. mpi4py binds each at its
    # first call, when some would resolve to the copy of hwloc inside TensorFlow.
    file: str = core().hvd_mpi_file().decode()
    if "/native/alone/" in file:
        return ""
    if os.path.basename(file).startswith("libmpich."):
        return _find("native/mpich/libmpi.so.12")
    return file


def mpi_version() -> str:
    """Return the version text of the MPI that the core uses."""
    text: str = core().hvd_mpi_version().decode()
    return text.strip("\0\n ")


def tensorflow_folders() -> dict[str, pathlib.Path]:
    """The folders with the TensorFlow ops, by TensorFlow's version (``"2.21"``), oldest first."""
    # Those of the package are of one build with the core, so they come last and count.
    roots = [user_folder(), *(pathlib.Path(folder) / "native" for folder in hvd_keras.__path__)]
    found = {
        library.parent.name.removeprefix("tf"): library.parent
        for root in roots
        for library in root.glob("tf*/libhvd_tensorflow.so")
    }
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in item[0].split(".")]))


def tensorflow_facts() -> tuple[dict[str, str], list[str]]:
    """What ``hvd_keras.check`` says of TensorFlow, and the names of the GPUs that it sees."""
    import tensorflow as tf

    found = {"TensorFlow": f"{tf.__version__}, built for {', '.join(tensorflow_folders())}"}
    why = why_no_xla()
    found["XLA"] = f"not used: {why}" if why else "used where models ask for it"
    return found, [device.name for device in tf.config.list_physical_devices("GPU")]


def user_folder() -> pathlib.Path:
    """Where ``python -m hvd_keras.build`` puts libraries if the package's folder is read-only."""
    return settings.user_cache() / f"hvd_keras-{hvd_keras.__version__}"


@functools.cache
def _tensorflow_folder() -> pathlib.Path:
    import tensorflow as tf

    folders = tensorflow_folders()
    version = ".".join(tf.__version__.split(".")[:2])
    if version not in folders:
        other = f", or 'pip install \"tensorflow=={[*folders][-1]}.*\"'" if folders else ""
        raise RuntimeError(
            f"hvd_keras was built for TensorFlow {', '.join(folders) or '(none)'}, and this is "
            f"TensorFlow {tf.__version__}; their C++ interfaces differ. Run '{_BUILD}', which "
            f"compiles the ops for it (needs g++){other}."
        )
    return folders[version]


@functools.cache
def tensorflow_ops() -> Any:
    """Return the module of raw TensorFlow ops.

    Raises:
        RuntimeError: hvd_keras was not built for this TensorFlow.
    """
    import tensorflow as tf

    core()  # the library of the ops finds it by its soname
    path = _tensorflow_folder() / "libhvd_tensorflow.so"
    try:
        ops = tf.load_op_library(str(path))
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        raise RuntimeError(
            f"{path} does not load into this TensorFlow {tf.__version__}, which may be a "
            f"custom build: {error}. Run '{_BUILD}', which compiles the ops for it (needs g++)."
        ) from error
    why_no_xla()
    return ops


@functools.cache
def why_no_xla() -> str:
    """Load the library that lets XLA compile the ops. Returns an error message, or ""."""
    import tensorflow as tf

    core()
    path = _tensorflow_folder() / "libhvd_xla.so"
    if not path.exists():
        return (
            f"TensorFlow {tf.__version__} lacks XLA's C++ interface for custom calls; 2.21 has it"
        )
    try:
        tf.load_library(str(path))
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        return f"{path} does not load: {error}"
    return ""
