"""Merges the ranks' output line by line, with the rank before each line."""

import asyncio
import contextlib
import errno
import itertools
import os
import queue
import re
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hvd_keras.launch.errors import refusing, say, say_once
from hvd_keras.launch.follow.supervise import Signals
from hvd_keras.launch.onhost.limits import LONG_LINE_DELAY, PARTIAL_LINE_DELAY

TAIL_LIMIT = 1 << 16  # bytes of a rank's last errors that are kept, to tell why it failed
RECENT_LINES = 40  # lines of output, at the end, that a user sees at once
MESSAGE_LINES = 20  # lines of an exception's message that are repeated at most
LONG_LINE = 1 << 12  # bytes of output that is no prompt or progress bar
PARTIAL_LINE_LIMIT = 1 << 20  # bytes of an unfinished line that are kept at most
WAITING_LIMIT = 1 << 20  # bytes that may wait for a slow reader before the ranks wait, too
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk that is full at the moment

# What TensorFlow says at its start about CUDA, oneDNN and the CPU, where nothing is wrong: notices
# of the severity "information" of its C++ part, in its two formats, and what the host has not.
_SOURCE = rb" \S+\.(?:cc|h):\d+\] "
NOTICE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I\d{4} [\d:.]+ +\d+" + _SOURCE + rb"|\d{4}-\d\d-\d\d [\d:.]+: I" + _SOURCE +
    rb"|To enable the following instructions: "
    rb"|[EW]\d{4} [\d:.]+ +\d+" + _SOURCE + rb".*(?:cuInit: .*UNKNOWN ERROR \(303\)"
    rb"|Unable to register cu\w+ factory|computation placer already registered"
    rb"|oneDNN supports DT_HALF only on platforms with AVX-512)"
)  # fmt: skip


class Destination:
    """One of hvdrun's own descriptors. Calls `changed` when something is, or cannot be, written.

    A thread does the writing: a reader that pauses, such as a pager, must not keep hvdrun from
    hearing a signal.
    """

    def __init__(self, descriptor: int, changed: Callable[[], None]) -> None:
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.lines = 0  # written so far
        self.unfinished: Stream | None = None  # whose line is unfinished there
        self.waiting = 0  # bytes that are not yet written
        self.error: OSError | None = None  # why nothing can be written
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Queue `data` for writing; it is dropped if the reader is gone."""
        if self.error is not None:
            return
        self.waiting += len(data)
        self._queue.put(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        with contextlib.suppress(RuntimeError):  # hvdrun has not waited for the reader
            while True:
                data = self._queue.get()
                error = _write(self.descriptor, data)
                self._loop.call_soon_threadsafe(self._note, len(data), error)

    def _note(self, written: int, error: OSError | None) -> None:
        self.waiting -= written
        if error is not None and error.errno not in FULL:
            self.error, self.waiting = error, 0
        elif error is not None:
            say_once(f"cannot write the ranks' output: {error.strerror}; a part is lost")
        self._changed()


def _write(descriptor: int, data: bytes) -> OSError | None:
    """Write all of `data`; returns the error that made it impossible, if any."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # the descriptor was handed to us as non-blocking
            select.select([], [descriptor], [])
        except OSError as error:
            return error
    return None


@dataclass
class Copy:
    """The file of one rank in `--output-dir`. The job goes on if it cannot be written."""

    path: Path
    mode: str = "wb"  # empty after an error

    def write(self, data: bytes) -> None:
        """Write all of `data`; after an error, nothing."""
        try:
            if self.mode:
                with open(self.path, self.mode) as file:
                    file.write(data)
                self.mode = "ab"
        except OSError as error:
            self.mode = ""
            say(f"cannot write {self.path}: {error.strerror}; the rest is not copied")


@dataclass
class Stream:
    """The stdout or stderr of one rank on its way to a destination, with a prefix for each line.

    A line that stays unfinished for PARTIAL_LINE_DELAY is shown as far as it is known; in long
    output for LONG_LINE_DELAY, as a busy host may stop a rank within it. It is broken there if
    another stream writes before its rest comes; without a prefix the bytes pass unchanged. A `copy`
    gets every byte, and TensorFlow's notices, which the destination drops.
    """

    destination: Destination
    prefix: bytes
    copy: Copy | None = None
    drops_notices: bool = False
    tail: bytes = b""  # the last TAIL_LIMIT bytes
    _shown: int = 0  # how many lines the destination had when this one wrote last
    _timer: asyncio.TimerHandle | None = None  # shows the unfinished line
    _pending: bytearray = field(default_factory=bytearray)  # the unfinished line

    def feed(self, data: bytes) -> None:
        """Take over new output and pass on the lines that are complete."""
        self.tail = (self.tail + data)[-TAIL_LIMIT:]
        is_long = len(self._pending) + len(data) > PARTIAL_LINE_LIMIT
        if complete := len(data) if is_long else data.rfind(b"\n") + 1:
            self._pending += data[:complete]
            self.flush()
        self._pending += data[complete:]
        if self._pending and self._timer is None:
            # What came with much else is rather the begin of more.
            self._wait(PARTIAL_LINE_DELAY if len(data) < LONG_LINE else LONG_LINE_DELAY)

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._show, seconds)

    def _show(self, waited: float) -> None:
        if len(self._pending) < LONG_LINE or waited == LONG_LINE_DELAY:
            self.flush()
        else:
            self._wait(LONG_LINE_DELAY)

    def flush(self) -> None:
        """Pass on all that is there, with the unfinished line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        data = bytes(self._pending)
        self._pending.clear()
        if self.copy is not None:
            self.copy.write(data)
        lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
        if self.drops_notices:
            lines = [line for line in lines if line[-1:] != b"\n" or not NOTICE.match(line)]
        if lines:
            self._write(lines)

    def lines_since(self, position: int) -> int:
        """How many lines the destination has after this position of the tail."""
        own = self.tail.count(b"\n", position)
        return own + self.destination.lines - self._shown

    def _write(self, lines: list[bytes]) -> None:
        start = b""
        if self.prefix:
            unfinished = self.destination.unfinished
            if unfinished is not self:
                start = self.prefix if unfinished is None else b"\n" + self.prefix
            if self.destination.is_terminal:  # a progress bar begins its line again and again
                lines = [re.sub(rb"\r(?!\n)", b"\r" + self.prefix, line) for line in lines]
        self.destination.unfinished = None if lines[-1].endswith(b"\n") else self
        self._shown = self.destination.lines = self.destination.lines + len(lines)
        # One call for all lines, so that no other process's output comes in between.
        self.destination.write(start + self.prefix.join(lines))


class Output:
    """All that hvdrun prints: its own words, and the ranks' streams, which `directory` gets, too.

    `verbose` shows TensorFlow's notices. Sets `signals.changed` when nothing can be written any
    more. The ranks wait for the reader while hvdrun is patient.
    """

    def __init__(
        self, prefix: bool, directory: str | None, verbose: bool, signals: Signals
    ) -> None:
        self._drops_notices = not verbose and os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"
        self.room = asyncio.Event()  # the reader has read something
        self._signals = signals
        self._out = Destination(1, self._note)
        self._err = self._out if os.path.sameopenfile(1, 2) else Destination(2, self._note)
        self._prefix = prefix
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            with refusing(f"--output-dir got {directory!r}, which cannot be made"):
                self._directory.mkdir(parents=True, exist_ok=True)
        self._copies: dict[int, Copy] = {}
        self._streams: dict[tuple[int, str], Stream] = {}

    def start(self) -> None:
        """Forget the streams of an earlier start, and remove the copies of an earlier job."""
        self._streams.clear()
        if self._directory is not None and not self._copies:
            for path in self._directory.glob("rank-*.txt"):
                if path.stem[5:].isdecimal():
                    with contextlib.suppress(OSError):
                        path.unlink()

    def stream(self, rank: int, name: str) -> Stream:
        """Return a rank's stream "out" or "err"."""
        if (rank, name) not in self._streams:
            prefix = f"[{rank}] ".encode() if self._prefix else b""
            if self._directory is not None and rank not in self._copies:
                self._copies[rank] = Copy(self._directory / f"rank-{rank}.txt")
            destination = self._err if name == "err" else self._out
            drops = name == "err" and self._drops_notices
            self._streams[rank, name] = Stream(destination, prefix, self._copies.get(rank), drops)
        return self._streams[rank, name]

    @property
    def error(self) -> OSError | None:
        """The error that made it impossible to write the output, if any."""
        return self._out.error or self._err.error

    @property
    def full(self) -> bool:
        """Whether the reader is so slow that the ranks should wait."""
        return self._signals.patient() and max(self._out.waiting, self._err.waiting) > WAITING_LIMIT

    def _note(self) -> None:
        self.room.set()
        if self.error is not None:
            self._signals.changed.set()

    @property
    def empty(self) -> bool:
        """Whether everything is written, or cannot be."""
        return self._out.waiting == self._err.waiting == 0

    def finish(self) -> None:
        """Show all that is unfinished."""
        for stream in self._streams.values():
            stream.flush()

    def write_raw(self, data: bytes) -> None:
        """Write to stderr as it is."""
        self._err.write(data)

    def say(self, text: str) -> None:
        """Print a message of hvdrun's own on stderr."""
        start = b"\n" if self._err.unfinished is not None else b""
        # Paths need not be valid UTF-8.
        self._err.write(start + f"hvdrun: {text}\n".encode(errors="surrogateescape"))
        self._err.unfinished = None

    def traceback(self, rank: int, recent: bool = True, last: bool = False) -> tuple[str, str]:
        """A rank's last traceback, and its message alone.

        If not `recent`, one far above only; if `last`, only one that little of the rank's follows.
        """
        stream = self._streams.get((rank, "err"))
        if stream is None:
            return "", ""
        before, found, text = stream.tail.rpartition(b"Traceback (most recent call last):\n")
        if not found or (not recent and stream.lines_since(len(before)) < RECENT_LINES):
            return "", ""
        lines = text.decode(errors="replace").splitlines()
        body = [*itertools.takewhile(lambda line: line.startswith(" "), lines)]
        message = lines[len(body) :]
        if last and len(message) > RECENT_LINES:
            return "", ""
        if len(message) > MESSAGE_LINES:  # TensorFlow puts where a graph's node was made before why
            message = [message[0], "…", *message[2 - MESSAGE_LINES :]]
        whole = ["Traceback (most recent call last):", *body, *message]
        return "\n".join(whole), "\n".join(message)
