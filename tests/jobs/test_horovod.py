"""Programs that import Horovod, run as they are; and programs that never call hvd.init()."""

import os
import pathlib
import sys

import pytest

from tests.harness import ranks

PROGRAM = """
import importlib.util
import sys
assert importlib.util.find_spec("horovod") is not None
try:
    import horovod.tensorflow as hvd
except ImportError:
    sys.exit("serial")
hvd.init()
print(f"sum {int(hvd.allreduce(hvd.rank() + 1, op=hvd.Sum))} of {sys.argv[1:]}")
"""

SAID = "'horovod' is hvd_keras"


def check(job: ranks.Job) -> None:
    assert job.status == 0, job.output
    assert job.output.count("sum 3 of ['a', '-b']") == 2, job.output
    assert job.output.count(SAID) == 1, job.output


def python(tmp_path: pathlib.Path, *options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    return [sys.executable, *options, str(script), "a", "-b"]


def test_hvdrun(hvdrun) -> None:
    (hvdrun.folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "train.py", "a", "-b"]
    done = hvdrun.run("--horovod", "-np", "2", "--oversubscribe", *command)
    check(ranks.Job(done.returncode, done.stdout + done.stderr))
    without = hvdrun.run("-np", "1", *command)
    assert "serial" in without.stderr or "AssertionError" in without.stderr


def test_module_as_a_launcher_of_scripts(tmp_path: pathlib.Path) -> None:
    check(ranks.mpirun(2, *python(tmp_path, "-u", "-m", "hvd_keras.horovod")))


@pytest.mark.parametrize("kind", ["program", "module"])
def test_module_as_a_launcher_of_programs(kind: str, tmp_path: pathlib.Path) -> None:
    if kind == "program":
        program = tmp_path / "trainer"
        program.write_text(f"#!{sys.executable}\n{PROGRAM}")
        program.chmod(0o700)
        words = ["trainer"]
    else:
        (tmp_path / "trainer.py").write_text(PROGRAM)
        words = ["-m", "trainer"]
    start = [sys.executable, "-m", "hvd_keras.horovod"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    check(ranks.mpirun(2, *start, *words, "a", "-b", env=env))


def test_install(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("import hvd_keras.horovod\nhvd_keras.horovod.install()\n" + PROGRAM)
    check(ranks.mpirun(2, sys.executable, str(script), "a", "-b"))


def test_another_horovod_is_told(tmp_path: pathlib.Path) -> None:
    """As an installed distribution, which is hidden, and as a module that was imported before."""
    (tmp_path / "horovod-0.27.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: horovod\nVersion: 0.27.0\n"
    (tmp_path / "horovod-0.27.0.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "horovod.py").write_text("")
    script = tmp_path / "notebook.py"
    script.write_text(
        "import hvd_keras.horovod\n"
        "hvd_keras.horovod.install()\n"
        "import horovod.keras\n"
        "horovod.keras.init()\n"
        "for name in list(sys.modules):\n"
        "    if name.startswith('horovod'):\n"
        "        del sys.modules[name]\n"
        "sys.path.remove(hvd_keras.horovod.PATH)\n"
        "import horovod\n"
        "hvd_keras.horovod.install()\n".replace("import hvd_keras", "import sys, hvd_keras", 1)
    )
    job = ranks.mpirun(1, sys.executable, str(script))
    assert "in place of the installed horovod 0.27.0" in job.output, job.output
    assert "RuntimeError: hvd_keras.horovod.install: 'import horovod' finds" in job.output
    assert job.status != 0


# Programs that never call hvd.init()

SERIAL = """
import sys
sys.stdout.flush()
try:
    import horovod.tensorflow as hvd
    hvd.no_such_name
except AttributeError:
    hvd = None
print("trained")
"""
TOLD = "no rank called hvd.init(), so these were separate runs"


@pytest.mark.parametrize(
    ("options", "text", "status"),
    [
        (["--horovod"], SERIAL, 1),
        (["--horovod", "--max-restarts", "2"], SERIAL, 1),
        (["--horovod", "--separate"], SERIAL, 0),
        (["--horovod"], "print('trained')", 1),  # a Python that does not see PYTHONPATH, say
        ([], "import hvd_keras as hvd; hvd.linear_scaling; print('trained')", 1),
        ([], "import hvd_keras; print('trained')", 0),
        ([], "print('trained')", 0),
    ],
    ids=["import", "restarts", "separate", "nothing", "hvd_keras", "unused", "other program"],
)
def test_separate_runs_are_a_failure(hvdrun, options, text, status) -> None:
    command = [sys.executable, hvdrun.script(text)]
    done = hvdrun.run(*options, "-np", "2", "--oversubscribe", *command)
    assert done.stdout.count("trained") == 2, done.stderr
    assert (done.returncode, done.stderr.count(TOLD)) == (status, status), done.stderr


def test_one_rank_needs_no_init(hvdrun) -> None:
    done = hvdrun.run("--horovod", "-np", "1", sys.executable, hvdrun.script("print('trained')"))
    assert (done.returncode, done.stderr) == (0, "")
