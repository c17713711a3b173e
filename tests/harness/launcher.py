"""Runs hvdrun in a folder of its own, and finds what its jobs leave behind."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import time

from hvd_keras.launch.onhost.cores import THREAD_VARIABLES
from tests.harness.ranks import LIMIT

FOREVER = 10_000
KEEP = "20"  # that a process with Keras waits for the next job

# A sitecustomize.py, with which Python does not find the packages in the variable HIDDEN.
WITHOUT_HIDDEN = """\
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hidden = __import__("os").environ["HIDDEN"].split()
def hide(name, *more): return None if name in hidden else find(name, *more)
PathFinder.find_spec = hide
"""

# Rank and size without MPI, for scripts that must not depend on it.
PRELUDE = """\
import os, signal, sys, time
names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))

def meet(size):
    open(f"here-{rank}", "w").close()
    while not all(os.path.exists(f"here-{other}") for other in range(size)):
        time.sleep(0.02)

"""


class Launcher:
    """Runs hvdrun in a folder of its own, where it keeps its temporary files as well."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.environment = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
        self.environment["TMPDIR"] = str(self.temporary)
        # As in an active environment: Debian has no python, only python3.
        folders = (os.path.dirname(sys.executable), os.environ["PATH"])
        self.environment["PATH"] = os.pathsep.join(folders)
        self.watchdogs: list[threading.Timer] = []
        self.options = ["--no-init"]  # most scripts need no hvd_keras
        self.head = PRELUDE  # of each script
        self.forks = False  # whether ranks that import Keras are forks of what has

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(self.head + textwrap.dedent(text))
        return str(path)

    def program(self, name: str, text: str) -> str:
        """Make a program of the shell in the folder; return its path."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hvd_keras.hvdrun", *self.options, *arguments]

    def _environment(self, arguments: tuple[str, ...], given: dict[str, str]) -> dict[str, str]:
        """Return what hvdrun gets: other scripts, and restarts, need no imports of earlier jobs."""
        scripts = [self.folder / word for word in arguments if word.endswith(".py")]
        needs = any("keras" in path.read_text() for path in scripts if path.is_file())
        forks = self.forks and needs and "--max-restarts" not in arguments
        return given | {"HVD_KEEP_IMPORTS": KEEP} if forks else given

    def run(
        self, *arguments: str, status: int | None = None, **options
    ) -> subprocess.CompletedProcess[str]:
        """Run hvdrun until it ends; if a status is given, it must end with that."""
        env = self._environment(arguments, options.pop("env", self.environment))
        usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        usual |= {"timeout": LIMIT} | ({} if "input" in options else {"stdin": subprocess.DEVNULL})
        command = self.command(*arguments)
        done = subprocess.run(command, cwd=self.folder, env=env, **(usual | options))
        assert status in (None, done.returncode), f"{done.stdout}{done.stderr}"
        return done

    def python(self, size: int, text: str, *arguments: str, **options):
        """Run `size` ranks of a Python script."""
        job = ("-np", str(size), "--oversubscribe", sys.executable, self.script(text))
        return self.run(*job, *arguments, **options)

    def start(self, size: int, text: str, *options: str, stdin: int = subprocess.DEVNULL):
        """Start such a job, which is killed after LIMIT seconds."""
        job = (*options, "-np", str(size), "--oversubscribe", sys.executable)
        script = self.script(text)
        process = subprocess.Popen(
            self.command(*job, script),
            cwd=self.folder,
            env=self._environment((*options, script), self.environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        self.watchdogs.append(watchdog)
        return process

    def start_ready(self, size: int, text: str, *options: str):
        """Start such a job and wait until every rank has printed "ready"."""
        process = self.start(size, text, *options)
        assert sorted(process.stdout.readline() for _ in range(size)) == [
            f"[{rank}] ready\n" for rank in range(size)
        ]
        return process

    def processes(self) -> dict[int, str]:
        """The processes of this launcher's jobs, which have its folder in their environment."""
        return having(f"={self.temporary}")


def having(mark: str) -> dict[int, str]:
    """The command lines of the processes that have this text in their environment."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(path.name)] = line.decode(errors="replace")
        except OSError:
            continue
    return found


def parent(pid: int) -> int | None:
    """The parent of a process; None if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[1])


def send_signal(pid: int, number: int) -> None:
    """Send a process a signal and wait until it is taken: two at once would arrive as one."""
    os.kill(pid, number)
    status = pathlib.Path(f"/proc/{pid}/status")

    def is_taken() -> bool:
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        pending = re.findall(r"^S(?:ig|hd)Pnd:\t(\w+)", text, re.MULTILINE)
        return "\nState:\tZ" in text or not any(int(m, 16) >> (number - 1) & 1 for m in pending)

    wait_until(is_taken, f"process {pid} takes signal {number}")


def wait_until(condition, what: str) -> None:
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit, f"not within {LIMIT} s: {what}"
        time.sleep(0.05)
