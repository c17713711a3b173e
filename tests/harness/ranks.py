"""Starts real jobs of several ranks, and ends them."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass

MPIRUN = pathlib.Path(sys.executable).parent / "mpirun"


@dataclass
class Job:
    """The outcome of a job."""

    status: int
    output: str


def mpirun(
    size: int,
    *command: str,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    inside: tuple[str, ...] = (),
) -> Job:
    """Runs a command on ``size`` ranks under the plain mpirun, without hvdrun.

    ``inside`` is a command that runs mpirun, which is passed as its last arguments.

    A job that takes longer than ``timeout`` seconds is killed with all its processes, and fails the
    test with a message that shows what the ranks have printed.
    """
    arguments = [str(MPIRUN), "-np", str(size), "--bind-to", "none"]
    arguments += ["--map-by", ":OVERSUBSCRIBE", "--output", "tag"]
    if os.geteuid() == 0:
        arguments.append("--allow-run-as-root")
    process = subprocess.Popen(
        [*inside, *arguments, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        raise AssertionError(f"{size} ranks did not end within {timeout} s:\n{output}") from None
    return Job(process.returncode, output)


def run_script(
    directory: pathlib.Path, size: int, script: str, timeout: float = 120, **env: str
) -> Job:
    """Runs the text of a Python script on ``size`` ranks."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    return mpirun(size, sys.executable, "-u", str(path), timeout=timeout, env=env)
