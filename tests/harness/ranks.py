"""Starts real jobs of several ranks, and ends them."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass

MPIRUN = pathlib.Path(sys.executable).parent / "mpirun"


@dataclass
class Job:
    """The outcome of a job."""

    status: int
    output: str


def start(
    size: int,
    *command: str,
    output: pathlib.Path,
    env: dict[str, str] | None = None,
    inside: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a command on ``size`` ranks under the plain mpirun, without hvdrun.

    ``inside`` is a command that runs mpirun, which is passed as its last arguments. What the ranks
    print is written to the file ``output``.
    """
    arguments = [str(MPIRUN), "-np", str(size), "--bind-to", "none"]
    arguments += ["--map-by", ":OVERSUBSCRIBE", "--output", "tag"]
    if os.geteuid() == 0:
        arguments.append("--allow-run-as-root")
    # Open MPI does not start if a killed mpirun that had the same PID has left its files.
    own = {"PRTE_MCA_prte_local_tmpdir_base": str(output.parent)}
    with output.open("wb") as file:
        return subprocess.Popen(
            [*inside, *arguments, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own, **(env or {})},
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], timeout: float) -> int:
    """Wait for a job and return its exit status. Kill one that takes longer than ``timeout`` s."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        end(process)
        raise AssertionError(f"the ranks did not end within {timeout} s") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job with all its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


def mpirun(
    size: int,
    *command: str,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    inside: tuple[str, ...] = (),
) -> Job:
    """Run a command on ``size`` ranks, as ``start`` does, until it ends.

    A job that takes longer than ``timeout`` seconds is killed with all its processes, and fails the
    test with a message that shows what the ranks have printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "output"
        process = start(size, *command, output=output, env=env, inside=inside)
        try:
            status = finish(process, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{output.read_text(errors='replace')}") from None
        except BaseException:
            end(process)
            raise
        return Job(status, output.read_text(errors="replace"))


def run_script(
    directory: pathlib.Path, size: int, script: str, timeout: float = 120, **env: str
) -> Job:
    """Runs the text of a Python script on ``size`` ranks."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    return mpirun(size, sys.executable, "-u", str(path), timeout=timeout, env=env)
