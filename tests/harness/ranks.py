"""Starts real jobs of several ranks, and ends them.

    python -I -S ranks.py SCRIPT ARGUMENT ...

takes the place of ``python -u SCRIPT ARGUMENT ...`` under a plain mpirun, and forks it, as hvdrun's
worker does, from a process that has imported Keras (HVD_KEEP_IMPORTS).
"""

import contextlib
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from types import ModuleType

# Seconds, against hangs alone: far above what any job takes on a busy machine, far below the sleep
# of a rank that must be ended.
LIMIT = 900
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
    timeout: float = LIMIT,
    env: dict[str, str] | None = None,
    inside: tuple[str, ...] = (),
    status: int | None = None,
) -> Job:
    """Run a command on ``size`` ranks, as ``start`` does, until it ends.

    A job that takes longer than ``timeout`` seconds is killed with all its processes. Then, or if
    it ends with another ``status`` than is given, the test fails with what the ranks have printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "output"
        process = start(size, *command, output=output, env=env, inside=inside)
        try:
            ended_with = finish(process, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{output.read_text(errors='replace')}") from None
        except BaseException:
            end(process)
            raise
        job = Job(ended_with, output.read_text(errors="replace"))
        assert status in (None, job.status), job.output
        return job


def run_script(
    directory: pathlib.Path,
    size: int,
    script: str,
    timeout: float = LIMIT,
    *,
    forks: bool = True,
    status: int | None = None,
    **env: str,
) -> Job:
    """Runs the text of a Python script on ``size`` ranks; without ``forks``, in new Pythons."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    python = [sys.executable, "-I", "-S", __file__] if forks else [sys.executable, "-u"]
    return mpirun(size, *python, str(path), timeout=timeout, env=env, status=status)


def python(
    *arguments: object, cwd: str | pathlib.Path | None = None, status: int | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs this Python outside of a job, with more variables in its environment."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def fork() -> None:
    """Run this process's arguments in a fork, or, if there can be none, in a new Python."""
    # The package itself would look for others.
    package = sys.modules["hvd_keras"] = ModuleType("hvd_keras")
    package.__path__ = [str(pathlib.Path(__file__).parents[2] / "hvd_keras")]
    fork_server = importlib.import_module("hvd_keras.launch.onhost.fork_server")
    command = [sys.executable, "-u", *sys.argv[1:]]
    order = {"command": command, "directory": os.getcwd(), "open_files": None}
    child = fork_server.fork_kept(order, {**os.environ, "HVD_KEEP_IMPORTS": "20"}, (0, 1, 2))
    if child is None:
        os.execv(command[0], command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.killpg(child.pid, number))
    child.connection.setblocking(True)
    status = child.poll()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    fork()
