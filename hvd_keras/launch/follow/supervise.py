"""Runs mpirun, forwards the ranks' output, and cleans up after the job."""

from __future__ import annotations

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

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.follow.outcome import Verdict, describe_apart, has_failed, judge
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.ranks import Ranks
from hvd_keras.launch.onhost.process import GRACE, die_with_parent

# Seconds between two looks at the reports while the job runs.
REPORT_CHECK = 1.0

# Seconds that processes left by mpirun and the workers get to end by themselves.
SWEEP_GRACE = 1.0

# Seconds that mpirun may take after the last rank is over, when it was asked to end.
OVER_GRACE = 1.0

# Seconds between two looks at the reader of our output, while it is slow.
SLOW_READER_CHECK = 0.1

# Bytes of mpirun's own text that are kept, and read at once; its banners are far shorter.
TEXT_LIMIT = 1 << 16

INFINITY = float("inf")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# How many files the user lets a process open.
# Some programs try to close every file that they might have open, so this is no more than needed.
MOST_OPEN_FILES = 1 << 16
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files() -> None:
    """Raise the limit of open files for hvdrun and mpirun, which need several for each rank.

    Workers on this host restore the user's limit for the ranks.
    """
    soft, hard = OPEN_FILES
    more = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < more:
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


@contextlib.contextmanager
def job_directory(job: str) -> Iterator[Path]:
    """A private directory for the files of one job, removed at the end."""
    path = Path(tempfile.gettempdir(), f"hvdrun-{job}")
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"cannot make a directory for the job's files: {error}; "
            "set TMPDIR to a folder with free space that you may write to"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Signals:
    """Signals to hvdrun.

    A signal that is ignored stays so, as `nohup` and a shell's `&` want it. `stop` is the first one
    that asked hvdrun to end, and `hurry` tells that the user does not want to wait. Whoever waits
    is woken up by `changed`, when a child has ended, too.
    """

    def __init__(self) -> None:
        self.stop: int | None = None
        self.hurry = False
        self.changed = asyncio.Event()

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self.changed.set)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _take(self, number: int) -> None:
        self.hurry = self.hurry or (self.stop is not None and number == signal.SIGINT)
        self.stop = number if self.stop is None else self.stop
        self.changed.set()

    async def wait(self, seconds: float) -> None:
        """Wait until something changes from now on, at most for so long."""
        self.changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), seconds)

    async def sleep(self, seconds: float) -> bool:
        """Sleep; returns False as soon as a signal asks hvdrun to end."""
        limit = time.monotonic() + seconds
        while self.stop is None and time.monotonic() < limit:
            await self.wait(limit - time.monotonic())
        return self.stop is None


@dataclass
class Job:
    """One run of mpirun, whose workers report through `ranks`.

    `sweep`, called when mpirun has ended, kills what is left of the job on its hosts after so many
    seconds, removes its files, and returns the hosts that are lost. `ended` is called when
    the ranks write nothing more.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    ranks: Ranks
    output: Output
    signals: Signals
    verbose: bool
    sweep: Callable[[float], Awaitable[Collection[str]]]
    ended: Callable[[], None]
    _mpirun_text: bytes = b""
    _stopping: bool = False
    _kill_time: float = INFINITY  # when to stop being patient with mpirun; finite once asked
    _report_limit: float = INFINITY  # when mpirun must have seen what the reports tell
    _next_report_check: float = 0.0
    _reader_limit: float = INFINITY  # when to stop being patient with who reads our output

    async def run(self) -> Verdict:
        """Run the job to its end."""
        hvdrun = os.getpid()
        mpirun = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A session of its own keeps the terminal's Ctrl-C to us.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(hvdrun),
        )
        self._mpirun = mpirun
        assert mpirun.stdout is not None
        os.set_blocking(mpirun.stdout.fileno(), False)
        loop = asyncio.get_running_loop()
        loop.add_reader(mpirun.stdout, self._take_mpirun_text)
        lost: Collection[str] = ()
        try:
            while mpirun.poll() is None:
                await self.turn(self._patience())
                self._check()
        finally:
            if mpirun.poll() is None:
                self._kill()
                mpirun.wait()
            lost = await self._clean()
            self._take_mpirun_text()
            loop.remove_reader(mpirun.stdout)
            mpirun.stdout.close()
            self.output.finish()
            self.ended()
        verdict = self._verdict(mpirun.returncode, lost)
        while self.output.patient and not self.output.empty:
            await self.turn(SLOW_READER_CHECK)
        return verdict

    def _take_mpirun_text(self) -> None:
        pipe = self._mpirun.stdout
        assert pipe is not None
        data = pipe.read(TEXT_LIMIT)  # None: there is nothing now
        if data == b"":
            asyncio.get_running_loop().remove_reader(pipe)
        elif data and self.verbose:
            self.output.mpirun_stream().feed(data)
        elif data:
            self._mpirun_text = (self._mpirun_text + data)[-TEXT_LIMIT:]

    def _patience(self) -> float:
        now = time.monotonic()
        return max(0.0, min(self._kill_time, self._next_report_check) - now)

    async def turn(self, timeout: float) -> None:
        """Wait until something happens, at most `timeout` seconds."""
        await self.signals.wait(timeout)
        now = time.monotonic()
        if self.signals.stop is not None:
            self._reader_limit = min(self._reader_limit, now + GRACE)
        self.output.patient = not self.signals.hurry and now < self._reader_limit
        if not self.output.full:
            self.ranks.resume()

    def _check(self) -> None:
        """End the job where mpirun does not do it by itself."""
        now = time.monotonic()
        if now >= self._next_report_check:
            self._next_report_check = now + REPORT_CHECK
            lost = self.ranks.check()
            reports = self.ranks.reports
            over = [report for report in reports.values() if report.status is not None]
            if lost or has_failed(reports) or len(over) == self.ranks.size:
                self._report_limit = min(self._report_limit, now + GRACE)
            if self.ranks.problem or lost:
                self._stop()
        if self.output.error or now >= self._report_limit or self.signals.stop is not None:
            self._stop()
        if self._stopping and self.ranks.over():
            self._kill_time = min(self._kill_time, now + OVER_GRACE)
        if now >= self._kill_time or self.signals.hurry:
            self._kill()

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._kill_time = time.monotonic() + GRACE
            self._mpirun.terminate()
            self.ranks.stop()

    def _kill(self) -> None:
        self._kill_time = time.monotonic()
        if self._mpirun.poll() is None:
            os.killpg(self._mpirun.pid, signal.SIGKILL)

    async def _clean(self) -> Collection[str]:
        """Wait for the workers' last messages, then clean up all hosts; returns the lost hosts."""
        limit = time.monotonic() + GRACE
        while self.ranks.live() and time.monotonic() < limit and not self.signals.hurry:
            await self.turn(0.1)
        return await self.sweep(0.0 if self.signals.hurry else SWEEP_GRACE)

    def _verdict(self, mpirun_status: int, lost: Collection[str]) -> Verdict:
        reports = self.ranks.reports
        error = self.output.error
        if self.signals.stop is not None:
            name = signal.Signals(self.signals.stop).name
            verdict = Verdict(
                128 + self.signals.stop, [f"{name} received; all ranks were ended"], True
            )
        elif error is not None:
            cause = f"cannot write the ranks' output: {error.strerror}; the job was ended"
            verdict = Verdict(1, [cause], True)
        else:
            if mpirun_status < 0 and not self._stopping:  # its daemons died of that
                for report in reports.values():
                    report.orphaned = INFINITY
            size = self.ranks.size
            verdict = dataclasses.replace(
                judge(reports, size, mpirun_status, lost),
                apart=describe_apart(reports, size),
                asked=any(report.arrived or report.marks for report in reports.values()),
            )
            if self.ranks.problem:
                lines = [self.ranks.problem, *verdict.lines[1:]]
                verdict = Verdict(1, lines, False)
        if not verdict.explained or (verdict.status != 0 and not reports):
            self.output.write_raw(self._mpirun_text)
        cause, *others = [*verdict.lines] or [""]
        if cause:
            self.output.say(cause)
        texts = [
            "" if verdict.culprit is None else self.output.traceback(verdict.culprit)[0],
            "" if verdict.waiting is None else self.output.traceback(verdict.waiting)[1],
        ]
        for text in filter(None, texts):
            self.output.write_raw(text.encode() + b"\n")
        for line in others:
            self.output.say(line)
        return verdict
