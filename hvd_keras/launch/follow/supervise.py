"""What hvdrun has while a job runs: its signals, its open files, a directory."""

import asyncio
import contextlib
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hvd_keras.launch.errors import refusing
from hvd_keras.launch.onhost import limits
from hvd_keras.launch.onhost.process import FORWARDED

T = TypeVar("T")

# How many files the user lets a process open.
# Some programs try to close every file that they might have open, so this is no more than needed.
MOST_OPEN_FILES = 1 << 16
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files() -> None:
    """Let hvdrun and mpirun open several files for each rank; workers here restore the limit."""
    soft, hard = OPEN_FILES
    more = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < more:
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


@contextlib.contextmanager
def job_directory(job: str) -> Iterator[Path]:
    """A private directory for the files of one job, removed at the end."""
    advice = "; set TMPDIR to a folder with free space that you may write to"
    with refusing("cannot make a directory for the job's files", advice):
        path = Path(tempfile.gettempdir(), f"hvdrun-{job}")
        path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Signals:
    """Signals to hvdrun; one that is ignored stays so, as `nohup` and a shell's `&` want it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stopped: asyncio.Future[int] = loop.create_future()  # by the first that asks for it
        self.hurry = False  # the user does not want to wait
        self._reader_limit = float("inf")  # when to stop waiting for the reader of our output
        self.changed = asyncio.Event()  # wakes up what waits, when a child has ended, too
        self.forward: Callable[[int], None] = lambda number: None  # gets those for the ranks
        loop.add_signal_handler(signal.SIGCHLD, self.changed.set)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *FORWARDED):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._take, number)

    @property
    def stop(self) -> int | None:
        """The first signal that asked hvdrun to end."""
        return self.stopped.result() if self.stopped.done() else None

    def _take(self, number: int) -> None:
        if number in FORWARDED:
            self.forward(number)
            return
        if not self.stopped.done():
            self.stopped.set_result(number)
            self._reader_limit = time.monotonic() + limits.GRACE
        elif number == signal.SIGINT:
            self.hurry = True
        self.changed.set()

    def patient(self) -> bool:
        """Whether the reader of our output may take its time."""
        return not self.hurry and time.monotonic() < self._reader_limit

    async def heed(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do this work; returns None as soon as a signal asks hvdrun to end."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self.stopped]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self.stopped.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until this happens from now on, at most for so long."""
    event.clear()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
