"""Merges the ranks' output line by line, with the rank before each line."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from hvd_keras.launch.errors import UsageError

# Seconds that an unfinished line waits for its rest: short enough for a prompt or a progress bar.
PARTIAL_LINE_DELAY = 0.1

# Bytes of a rank's last errors that are kept, to tell at the end why it failed.
TAIL_LIMIT = 1 << 16

# Lines of an exception's message that are repeated at most.
MESSAGE_LINES = 20

# Bytes of an unfinished line that are kept at most; bounds the memory for output without line ends.
PARTIAL_LINE_LIMIT = 1 << 20


# Bytes that may wait for a slow reader before the ranks have to wait, too, and that are written at
# once.
WAITING_LIMIT = 1 << 20
WRITE_PIECE = 1 << 16


class Destination:
    """One of hvdrun's own descriptors.

    `unfinished` is the stream whose line is unfinished there, and `error` what made writing
    impossible, if anything.

    A thread does the writing: a reader that pauses, such as a pager, must not keep hvdrun from
    hearing a signal. Callers check `full` before they read more from the ranks.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.unfinished: Stream | None = None
        self.error: OSError | None = None
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        """Whether the backlog is so long that the ranks should wait."""
        return len(self._waiting) > WAITING_LIMIT

    def write(self, data: bytes) -> None:
        """Queue `data` for writing; it is dropped if the reader is gone."""
        with self._changed:
            if self.error is not None:
                return
            self._waiting += data
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                piece = bytes(self._waiting[:WRITE_PIECE])
            try:
                written = os.write(self.descriptor, piece)
            except BlockingIOError:  # the descriptor was handed to us as non-blocking
                select.select([], [self.descriptor], [])
                continue
            except OSError as error:
                self.error = error
                written = len(self._waiting)
            with self._changed:
                del self._waiting[:written]
                self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is written; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)


class Copy:
    """The file of one rank in `--output-dir`. The job goes on if it cannot be written."""

    def __init__(self, path: Path, append: bool, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        if not append:
            path.unlink(missing_ok=True)
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Write all of `data`; after an error, nothing."""
        view = memoryview(data)
        try:
            while view and self._file is not None:
                view = view[self._file.write(view) :]
        except OSError as error:
            self.close()
            self._say(f"cannot write {self._path}: {error.strerror}; the rest is not copied")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `write` has told what there is to tell
                self._file.close()
            self._file = None


class Stream:
    """The stdout or stderr of one rank on its way to a destination.

    With an empty prefix the bytes pass unchanged. With a prefix each line begins with it; a line
    that stays unfinished for PARTIAL_LINE_DELAY is shown as far as it is known, and if another
    stream writes before its rest comes, it is broken there. Lines that begin as `hidden` says are
    dropped. A `copy` gets every byte, in whole lines.
    """

    def __init__(
        self,
        destination: Destination,
        prefix: bytes,
        hidden: re.Pattern[bytes] | None = None,
        copy: Copy | None = None,
    ) -> None:
        self.destination = destination
        self.copy = copy
        self.tail = b""  # the last TAIL_LIMIT bytes
        self.prefix = prefix
        self.hidden = hidden
        self.due = float("inf")  # when the unfinished line must be shown, by time.monotonic()
        self._pending = b""
        self._uncopied = b""

    def feed(self, data: bytes) -> None:
        """Take over new output and pass on the lines that are complete."""
        self.tail = (self.tail + data)[-TAIL_LIMIT:]
        self._copy_lines(data)
        lines, end, rest = (self._pending + data).rpartition(b"\n")
        self._pending = rest
        if end:
            self.due = float("inf")
            complete = [line + end for line in lines.split(end)]
            if self.hidden is not None:
                complete = [line for line in complete if not self.hidden.match(line)]
            if complete:
                self._write(complete)
                self.destination.unfinished = None
        if len(rest) > PARTIAL_LINE_LIMIT:
            self.flush()
        elif rest and self.due == float("inf"):
            self.due = time.monotonic() + PARTIAL_LINE_DELAY

    def _copy_lines(self, data: bytes) -> None:
        """Write what is complete to the copy, where two streams meet; at the end, all of it."""
        if self.copy is not None:
            self._uncopied += data
            complete = self._uncopied.rpartition(b"\n")
            whole = complete[0] + complete[1] if data else self._uncopied
            self._uncopied = self._uncopied[len(whole) :]
            self.copy.write(whole)

    def finish(self) -> None:
        """Flush everything: the stream has ended."""
        self.flush()
        self._copy_lines(b"")

    def flush(self) -> None:
        """Pass on the unfinished line as well."""
        if self._pending:
            self._write([self._pending])
            self.destination.unfinished = self
        self._pending = b""
        self.due = float("inf")

    def _write(self, lines: list[bytes]) -> None:
        start = b""
        if self.prefix:
            unfinished = self.destination.unfinished
            if unfinished is not self:
                start = self.prefix if unfinished is None else b"\n" + self.prefix
        # One call for all lines, so that no other process's output comes in between.
        self.destination.write(start + self.prefix.join(lines))


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:  # one of them is closed
        return False


class Output:
    """All that hvdrun prints: the ranks' streams and its own words.

    With a `directory`, each rank's output, both streams, goes to its file "rank-N.txt" there, too;
    `append` keeps what is there already.
    """

    def __init__(
        self,
        prefix: bool,
        hidden: re.Pattern[bytes] | None,
        directory: str | None,
        append: bool,
    ) -> None:
        self._out = Destination(1)
        self._err = self._out if _same_file(1, 2) else Destination(2)
        self._prefix = prefix
        self._hidden = hidden
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--output-dir got {directory!r}, which cannot be made: {error}"
                ) from error
        self._append = append
        self._copies: dict[int, Copy] = {}
        self._streams: dict[tuple[int | None, str], Stream] = {}

    def stream(self, rank: int, name: str) -> Stream:
        """A rank's stream "out" or "err"."""
        if (rank, name) not in self._streams:
            prefix = f"[{rank}] ".encode() if self._prefix else b""
            copy = None
            if self._directory is not None:
                if rank not in self._copies:
                    path = self._directory / f"rank-{rank}.txt"
                    self._copies[rank] = Copy(path, self._append, self.say)
                copy = self._copies[rank]
            to_err = name == "err"
            self._streams[rank, name] = Stream(
                self._err if to_err else self._out, prefix, self._hidden if to_err else None, copy
            )
        return self._streams[rank, name]

    def mpirun_stream(self) -> Stream:
        """Where mpirun's own messages are shown."""
        return self._streams.setdefault((None, "err"), Stream(self._err, b"[mpirun] "))

    @property
    def error(self) -> OSError | None:
        """The error that made it impossible to write the output, if any."""
        return self._out.error or self._err.error

    @property
    def full(self) -> bool:
        """Whether the reader is so slow that the ranks should wait."""
        return self._out.full or self._err.full

    def drain(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is written; returns whether it is."""
        return self._out.drain(seconds) and self._err.drain(seconds)

    def due(self) -> Iterable[float]:
        """When unfinished lines must be shown, by time.monotonic()."""
        return [stream.due for stream in self._streams.values()]

    def flush_due(self) -> None:
        """Show the unfinished lines whose time has come."""
        for stream in self._streams.values():
            if stream.due <= time.monotonic():
                stream.flush()

    def finish(self) -> None:
        """Show all that is unfinished, and close the copies."""
        for stream in self._streams.values():
            stream.finish()
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()

    def write_raw(self, data: bytes) -> None:
        """Write to stderr as it is."""
        self._err.write(data)

    def say(self, text: str) -> None:
        """Print a message of hvdrun's own on stderr."""
        start = b"\n" if self._err.unfinished is not None else b""
        self._err.write(start + f"hvdrun: {text}\n".encode())
        self._err.unfinished = None

    def traceback(self, rank: int) -> tuple[str, str]:
        """The last traceback that a rank has written to stderr, if any, and its message alone."""
        stream = self._streams.get((rank, "err"))
        if stream is None:
            return "", ""
        _, found, text = stream.tail.rpartition(b"Traceback (most recent call last):\n")
        if not found:
            return "", ""
        lines = text.decode(errors="replace").splitlines()
        body = 0
        while body < len(lines) and lines[body].startswith(" "):
            body += 1
        message = lines[body:]
        if len(message) > MESSAGE_LINES:  # TensorFlow puts where a graph's node was made before why
            message = [message[0], "…", *message[2 - MESSAGE_LINES :]]
        whole = ["Traceback (most recent call last):", *lines[:body], *message]
        return "\n".join(whole), "\n".join(message)
