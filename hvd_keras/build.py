"""``python -m hvd_keras.build``: compiles the ops for the TensorFlow of this environment.

The wheel contains the ops for some versions of TensorFlow. This module compiles them for other
versions and for custom builds. It needs a C++17 compiler and takes a minute or two.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import hvd_keras
from hvd_keras.runtime import libraries


def main() -> None:
    """Compiles the ops and prints the folder of the libraries."""
    if sys.argv[1:]:
        raise SystemExit(f"usage: python -m hvd_keras.build, without arguments; got {sys.argv[1:]}")
    core = libraries.search("native/*/libhvd_core.so")
    source = libraries.search("native/source")
    if core is None or source is None:
        raise SystemExit(
            f"hvd_keras.build: {list(hvd_keras.__path__)} lacks the core or the sources of "
            "hvd_keras. Install the wheel, or in a source checkout run 'make setup', which "
            "compiles for the TensorFlow that is installed."
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise SystemExit(f"hvd_keras.build: {sys.executable} has no TensorFlow to compile for.")
    folder = pathlib.Path(core).parents[1]
    if not os.access(folder, os.W_OK):
        folder = libraries.user_folder()
    with tempfile.TemporaryDirectory() as work:
        cmake = _program("cmake")
        configure = [cmake, "-S", source, "-B", work, f"-DHVD_CORE={core}"]
        _run(*configure, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_INSTALL_PREFIX=" + work)
        _run(cmake, "--build", work, "--parallel", str(os.cpu_count()))
        _run(cmake, "--install", work, "--strip")
        for built in (pathlib.Path(work) / "hvd_keras" / "native").glob("tf*"):
            (folder / built.name).mkdir(parents=True, exist_ok=True)
            for library in built.iterdir():
                # Rename, because a process may have loaded the old file.
                new = folder / built.name / f"{library.name}.new"
                shutil.copyfile(library, new)
                new.replace(new.with_suffix(""))
            print(f"Compiled for TensorFlow {built.name[2:]}, in {folder / built.name}")


def _program(name: str) -> str:
    beside = str(pathlib.Path(sys.executable).parent)
    path = shutil.which(name, path=beside) or shutil.which(name)
    if path is None:
        raise SystemExit(f"hvd_keras.build: {name} was not found. Run 'pip install {name}'.")
    return path


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"{done.stdout}\nhvd_keras.build: the command above failed: {' '.join(command)}\nIf a "
            "compiler or make is missing, install it (Debian: apt-get install g++ make)."
        )


if __name__ == "__main__":
    main()
