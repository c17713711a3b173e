"""Runs mpirun, passes the ranks' output on, and leaves nothing of the job behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hvd_keras.launch import UsageError, stdin, tensorflow_log
from hvd_keras.launch.output import Destination, Stream, Terminal
from hvd_keras.launch.verdict import Verdict, has_failed, judge, read_reports
from hvd_keras.launch.worker import (
    GRACE,
    PR_SET_CHILD_SUBREAPER,
    die_with_parent,
    prctl,
    stream_path,
)

# Seconds between two looks at the reports while the job runs.
REPORT_CHECK = 1.0

# Bytes of mpirun's own text that are kept; its banners are far shorter.
TEXT_LIMIT = 1 << 16

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def job_directory() -> Iterator[Path]:
    """A private directory for the files of one job, removed at the end."""
    try:
        path = tempfile.mkdtemp(prefix="hvdrun-")  # mode 700
    except OSError as error:
        raise UsageError(
            f"cannot make a directory for the job's files: {error}; "
            "set TMPDIR to a folder with free space that you may write to"
        ) from error
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Make signals readable: a descriptor from which each arrived signal's number can be read.

    A signal that is ignored stays so, as `nohup` and a shell's `&` want it.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def note(number: int, frame: FrameType | None) -> None:
        """Only the byte that the interpreter writes matters."""

    old_handlers = {
        number: signal.signal(number, note)
        for number in (*STOP_SIGNALS, signal.SIGCHLD)
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield reader
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_descriptor)
        os.close(reader)
        os.close(writer)


class Job:
    """One run of mpirun with `size` ranks, whose workers report into `directory`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        directory: Path,
        size: int,
        prefix: bool,
        verbose: bool,
    ) -> None:
        self._command = command
        self._environment = environment
        self._directory = directory
        self._size = size
        self._prefix = prefix
        self._verbose = verbose
        self._files = contextlib.ExitStack()
        self._selector = self._files.enter_context(selectors.DefaultSelector())
        self._streams: list[Stream] = []
        out_terminal = Terminal()
        err_terminal = out_terminal if _same_file(1, 2) else Terminal()
        self._out = Destination(1, out_terminal)
        self._err = Destination(2, err_terminal)
        self._mpirun_text = b""
        self._stop_signal: int | None = None  # the first one that asked hvdrun to end
        self._kill_time = float("inf")  # when to stop being patient with mpirun; finite once asked
        self._report_limit = float("inf")  # when mpirun must have seen what the reports tell
        self._next_report_check = 0.0

    def run(self, signals: int) -> Verdict:
        """Run the job to its end. `signals` is the descriptor of `signals_as_bytes`."""
        with self._files:
            return self._run(signals)

    def _run(self, signals: int) -> Verdict:
        # Whatever the job starts and abandons becomes our child and can be found at the end.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        strangers = _children()  # a shell's `exec hvdrun` hands its own children over
        self._watch(signals, self._take_signals)
        self._open_streams()
        input_reader, input_writer = stdin.make_pipe(self._directory)
        self._files.callback(os.close, input_reader)
        hvdrun = os.getpid()
        mpirun = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A session of its own keeps the terminal's Ctrl-C to us.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(hvdrun),
        )
        stdin.pump(input_writer)  # not before the fork, which wants a single thread
        self._mpirun = mpirun
        assert mpirun.stdout is not None
        try:
            self._open_mpirun_text(mpirun.stdout.fileno())
            while mpirun.poll() is None:
                self._turn(self._patience())
                self._check()
        finally:
            if mpirun.poll() is None:
                self._kill()
                mpirun.wait()
            self._sweep(strangers)
            self._finish_output()
        return self._verdict(mpirun.returncode)

    def _watch(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, take)

    def _open_streams(self) -> None:
        log = tensorflow_log.hidden_lines(self._environment)
        for rank in range(self._size):
            for name, destination, hidden in (("out", self._out, None), ("err", self._err, log)):
                path = stream_path(self._directory, rank, name)
                os.mkfifo(path, 0o600)
                prefix = f"[{rank}] ".encode() if self._prefix else b""
                stream = Stream(destination, prefix, hidden)
                self._streams.append(stream)
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._files.callback(os.close, descriptor)
                self._watch(descriptor, stream.feed)

    def _open_mpirun_text(self, descriptor: int) -> None:
        if self._verbose:
            stream = Stream(self._err, b"[mpirun] ")
            self._streams.append(stream)
            self._watch(descriptor, stream.feed)
        else:
            self._watch(descriptor, self._keep_mpirun_text)

    def _keep_mpirun_text(self, data: bytes) -> None:
        self._mpirun_text = (self._mpirun_text + data)[-TEXT_LIMIT:]

    def _patience(self) -> float:
        now = time.monotonic()
        return max(0.0, min(self._kill_time, self._next_report_check) - now)

    def _turn(self, patience: float) -> bool:
        """Wait at most `patience` seconds for events and handle them; False if there were none."""
        due = min(stream.due for stream in self._streams)
        events = self._selector.select(max(0.0, min(patience, due - time.monotonic())))
        for key, _ in events:
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, 1 << 16)
                key.data(data)
                if not data:
                    self._selector.unregister(key.fd)
        for stream in self._streams:
            if stream.due <= time.monotonic():
                stream.flush()
        return bool(events)

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in STOP_SIGNALS:
                if self._stop_signal is None:
                    self._stop_signal = number
                    self._stop()
                elif number == signal.SIGINT:  # the user does not want to wait any longer
                    self._kill()

    def _check(self) -> None:
        """End the job where mpirun does not do it by itself."""
        now = time.monotonic()
        if now >= self._next_report_check:
            self._next_report_check = now + REPORT_CHECK
            reports = read_reports(self._directory, self._size)
            over = [report for report in reports.values() if report.status is not None]
            if has_failed(reports) or len(over) == self._size:
                self._report_limit = min(self._report_limit, now + GRACE)
        if self._out.error or self._err.error or now >= self._report_limit:
            self._stop()
        if now >= self._kill_time:
            self._kill()

    def _stop(self) -> None:
        if self._kill_time == float("inf"):
            self._kill_time = time.monotonic() + GRACE
            self._mpirun.terminate()

    def _kill(self) -> None:
        self._kill_time = time.monotonic()
        if self._mpirun.poll() is None:
            os.killpg(self._mpirun.pid, signal.SIGKILL)

    def _sweep(self, strangers: set[int]) -> None:
        """End what is left of the job: processes that mpirun lost or that the ranks left behind."""
        now = time.monotonic()
        kill_time = min(self._kill_time, now + GRACE)
        asked: set[int] = set()
        while left := _children() - strangers:
            kill = time.monotonic() >= kill_time
            for pid in left:
                if kill or pid not in asked:
                    os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
                    asked.add(pid)
                os.waitpid(pid, os.WNOHANG)
            if time.monotonic() >= kill_time + GRACE:  # stuck in the kernel, on a disk perhaps
                self._say(f"process {', '.join(map(str, left))} of the job does not die")
                return
            self._turn(0.02)  # a process that waits for us to read its output cannot end

    def _finish_output(self) -> None:
        while self._turn(0.0):
            pass
        for stream in self._streams:
            stream.flush()

    def _say(self, text: str) -> None:
        start = b"\n" if self._err.terminal.unfinished is not None else b""
        self._err.write(start + f"hvdrun: {text}\n".encode())
        self._err.terminal.unfinished = None

    def _verdict(self, mpirun_status: int) -> Verdict:
        reports = read_reports(self._directory, self._size)
        error = self._out.error or self._err.error
        if self._stop_signal is not None:
            name = signal.Signals(self._stop_signal).name
            verdict = Verdict(128 + self._stop_signal, [f"ended by {name}, with all ranks"], True)
        elif error is not None:
            cause = f"cannot pass on the ranks' output: {error.strerror}; the job was ended"
            verdict = Verdict(1, [cause], True)
        else:
            verdict = judge(reports, self._size, mpirun_status)
        if not verdict.explained or (verdict.status != 0 and not reports):
            self._err.write(self._mpirun_text)
        for line in verdict.lines:
            self._say(line)
        return verdict


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:  # one of them is closed
        return False


def _children() -> set[int]:
    """The processes whose parent is this one, ended ones included."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it may be gone by now
                # "pid (name) state parent ...", where the name may hold anything
                fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2]
                if int(fields.split()[1]) == os.getpid():
                    found.add(int(entry))
    return found
