"""``HVD_AUTO=brain hvdrun --auto``: the first rank runs the script, the others compute for it."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.harness.launcher import Launcher

CASES = pathlib.Path(__file__).parents[1] / "scripts" / "brain_cases.py"


def brain(hvdrun: Launcher, size: int, *cases: str) -> subprocess.CompletedProcess[str]:
    environment = hvdrun.environment | {"HVD_AUTO": "brain"}
    job = ("--auto", "--no-prefix", "-np", str(size), "--oversubscribe")
    return hvdrun.run(*job, sys.executable, str(CASES), *cases, env=environment)


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.\d+(?:e-?\d+)?|nan", text)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_results_are_those_of_one_process(hvdrun: Launcher, size: int) -> None:
    command = [sys.executable, str(CASES), "steps", "loop"]
    alone = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    together = brain(hvdrun, size, "steps", "loop")
    assert together.returncode == 0, together.stderr
    words, other = (re.sub(r"-?[\d.]+", "", job.stdout) for job in (together, alone))
    assert words == other
    assert numbers(together.stdout) == pytest.approx(numbers(alone.stdout), rel=1e-4, abs=1e-4)
    assert "caught True" in together.stdout
    # What crosses rows is told with its line; Dense layers, clipping and masks do not.
    told = [line for line in together.stderr.splitlines() if "on the first rank alone" in line]
    ops = [set(re.findall(r"(\w+) \(brain_cases.py:\d+\)", line)) for line in told]
    assert ops == [{"MatMul"}, {"Sub"}, {"Sum"}, {"MatMul", "Equal"}], told


@pytest.mark.parametrize(
    ("case", "status", "told"),
    [
        ("exits", 3, "rank 0 failed first: exit status 3"),
        ("fails", 1, "KeyError: 'of the script'"),
        pytest.param("leaves", 4, "rank 0 failed first: exit status 4", marks=pytest.mark.slow),
        ("kills", 137, "rank 1 failed first: killed by SIGKILL"),
    ],
)
def test_the_end_of_the_script_ends_the_job(
    hvdrun: Launcher, case: str, status: int, told: str
) -> None:
    job = brain(hvdrun, 2, case)
    assert (job.returncode, job.stdout.count(case)) == (status, 1)
    assert told in job.stderr
    assert "left while others waited" not in job.stderr


@pytest.mark.slow
def test_what_is_refused(hvdrun: Launcher) -> None:
    for text, told in (
        ("import hvd_keras as hvd; hvd.init()", "this one calls hvd.init(). Leave out --auto"),
        ("import tensorflow as tf; tf.compat.v1.disable_eager_execution()", "of TensorFlow 1"),
    ):
        environment = hvdrun.environment | {"HVD_AUTO": "brain"}
        job = ("--auto", "-np", "2", "--oversubscribe", hvdrun.script(text))
        job = hvdrun.run(*job, env=environment)
        assert job.returncode == 1
        assert told in job.stderr
