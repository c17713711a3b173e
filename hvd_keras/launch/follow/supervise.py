"""Runs mpirun, forwards the ranks' output, and cleans up after the job."""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_keras.launch.errors import refusing, say
from hvd_keras.launch.follow.outcome import Verdict, describe_apart, judge, time_to_end
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.ranks import Ranks
from hvd_keras.launch.onhost import limits
from hvd_keras.launch.onhost.process import FORWARDED, die_with_parent

# Bytes of mpirun's own text that are kept, and read at once; its banners are far shorter.
TEXT_LIMIT = 1 << 16

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

    async def wait(self, seconds: float) -> None:
        """Wait until something changes from now on, at most for so long."""
        self.changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), seconds)

    async def sleep(self, seconds: float) -> bool:
        """Sleep; returns False as soon as a signal asks hvdrun to end."""
        await asyncio.wait([self.stopped], timeout=seconds)
        return not self.stopped.done()


@dataclass
class Job:
    """One run of mpirun, whose workers report through `ranks`."""

    command: Sequence[str]
    environment: Mapping[str, str]
    ranks: Ranks
    output: Output
    signals: Signals
    options: argparse.Namespace
    # When mpirun has ended: kills the job's remaining processes on its hosts after a number of
    # seconds, removes its files, and returns the hosts that are lost.
    sweep: Callable[[float], Awaitable[Collection[str]]]
    _mpirun_text: bytes = b""
    _stopping: bool = False

    async def run(self) -> Verdict:
        """Run the job to its end."""
        hvdrun = os.getpid()
        mpirun: Any = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # In a separate session it gets no Ctrl-C of the terminal.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(hvdrun),
        )
        self._mpirun = mpirun
        os.set_blocking(mpirun.stdout.fileno(), False)
        loop = asyncio.get_running_loop()
        loop.add_reader(mpirun.stdout, self._take_mpirun_text)
        self.signals.forward = lambda number: self.ranks.tell(signal=number)
        lost: Collection[str] = ()
        try:
            await self._follow()
        finally:
            if mpirun.poll() is None:
                os.killpg(mpirun.pid, signal.SIGKILL)
                mpirun.wait()
            self.ranks.release()
            await self._until(lambda: not self.ranks.live(), limits.GRACE)
            lost = await self.sweep(0.0 if self.signals.hurry else limits.SWEEP_GRACE)
            self._take_mpirun_text()
            loop.remove_reader(mpirun.stdout)
            mpirun.stdout.close()
            self.output.finish()
        return self._verdict(mpirun.returncode, lost)

    async def _follow(self) -> None:
        """Wait for the end of the job and of mpirun; end the job where that must be done."""
        # Workers have the patience to let their ranks save their work, and report how they ended;
        # mpirun is ended when they have.
        await self._until(self._must_end, float("inf"))
        if not self._all_over() and not self._has_ended():
            self._stopping = True
            grace = limits.GRACE if self.signals.stop is None else self.options.stop_timeout
            self.ranks.tell(stop=grace)
            await self._until(self.ranks.over, grace + limits.KILL_GRACE)
        self.ranks.release()
        if not self._stopping:
            await self._until(self._has_ended, limits.GRACE)
        if not self._has_ended():
            self._stopping = True
            self._mpirun.terminate()
            await self._until(self._has_ended, limits.OVER_GRACE)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for it, at most so long, and not when the user is in a hurry."""
        limit = time.monotonic() + seconds
        while not condition() and (left := limit - time.monotonic()) > 0:
            if self.signals.hurry:
                return
            await self.signals.wait(min(left, limits.CHECK))

    def _has_ended(self) -> bool:
        return self._mpirun.poll() is not None

    def _all_over(self) -> bool:
        reports = self.ranks.reports
        return len(reports) == self.ranks.size and self.ranks.over()

    def _must_end(self) -> bool:
        return (
            self._has_ended()
            or self.ranks.check()
            or self._all_over()
            or time_to_end(self.ranks.reports, time.monotonic())
            or self.output.error is not None
            or self.signals.stop is not None
        )

    def _take_mpirun_text(self) -> None:
        pipe = self._mpirun.stdout
        data = pipe.read(TEXT_LIMIT)  # None: there is nothing now
        if data == b"":
            asyncio.get_running_loop().remove_reader(pipe)
        elif data and self.options.verbose:
            self.output.mpirun_stream().feed(data)
        elif data:
            self._mpirun_text = (self._mpirun_text + data)[-TEXT_LIMIT:]

    def _verdict(self, mpirun_status: int, lost: Collection[str]) -> Verdict:
        reports = self.ranks.reports
        error = self.output.error
        if self.signals.stop is not None:
            cause = f"{signal.Signals(self.signals.stop).name} received; all ranks were ended"
            verdict = Verdict(128 + self.signals.stop, [cause])
        elif error is not None:
            cause = f"cannot write the ranks' output: {error.strerror}; the job was ended"
            verdict = Verdict(1, [cause])
        else:
            was_killed = mpirun_status < 0 and not self._stopping
            if was_killed:  # its daemons died of that
                for report in reports.values():
                    report.orphaned = float("inf")
            size = self.ranks.size
            verdict = dataclasses.replace(
                judge(reports, size, mpirun_status, lost, was_killed=was_killed),
                apart=describe_apart(reports, size),
                asked=any(report.marks for report in reports.values()),
            )
            if self.ranks.problem:
                lines = [self.ranks.problem, *verdict.lines[1:]]
                verdict = Verdict(1, lines, explained=False)
        if not verdict.explained or (verdict.status != 0 and not reports):
            self.output.write_raw(self._mpirun_text)
        text = ""
        if verdict.culprit is not None:
            # An exception of `hvd_keras.run` repeats it, even if it has been printed just before.
            repeats = self.options.call is not None
            text = self.output.traceback(verdict.culprit, recent=repeats)[0]
        elif verdict.waiting is not None:
            text = self.output.traceback(verdict.waiting)[1]
        for number, line in enumerate(verdict.lines):
            say(line)
            if number == 0 and text:
                self.output.write_raw(text.encode() + b"\n")
        return verdict
