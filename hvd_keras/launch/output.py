"""Joins the ranks' output: whole lines, each with its rank, never two ranks within a line."""

from __future__ import annotations

import os
import re
import select
import time

# Seconds that an unfinished line waits for its rest: short enough for a prompt or a progress bar.
PARTIAL_LINE_DELAY = 0.1

# Bytes of an unfinished line that are kept at most; bounds the memory for output without line ends.
PARTIAL_LINE_LIMIT = 1 << 20


class Terminal:
    """The line that is unfinished where the output is read, and the stream that it belongs to."""

    def __init__(self) -> None:
        self.unfinished: Stream | None = None


class Destination:
    """One of hvdrun's own descriptors. `error` is what made writing impossible, if anything."""

    def __init__(self, descriptor: int, terminal: Terminal) -> None:
        self.descriptor = descriptor
        self.terminal = terminal
        self.error: OSError | None = None

    def write(self, data: bytes) -> None:
        """Write all of `data`, or drop it when the reader is gone."""
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[os.write(self.descriptor, view) :]
            except BlockingIOError:  # the descriptor was handed to us as non-blocking
                select.select([], [self.descriptor], [])
            except OSError as error:
                self.error = error


class Stream:
    """The stdout or stderr of one rank on its way to a destination.

    With an empty prefix the bytes pass unchanged. With a prefix each line begins with it; a line
    that stays unfinished for PARTIAL_LINE_DELAY is shown as far as it is known, and if another
    stream writes before its rest comes, it is broken there. Lines that begin as `hidden` says are
    dropped.
    """

    def __init__(
        self, destination: Destination, prefix: bytes, hidden: re.Pattern[bytes] | None = None
    ) -> None:
        self.destination = destination
        self.prefix = prefix
        self.hidden = hidden
        self.due = float("inf")  # when the unfinished line must be shown, by time.monotonic()
        self._pending = b""

    def feed(self, data: bytes) -> None:
        """Take over new output and pass on the lines that are complete."""
        lines, end, rest = (self._pending + data).rpartition(b"\n")
        self._pending = rest
        if end:
            self.due = float("inf")
            complete = [line + end for line in lines.split(end)]
            if self.hidden is not None:
                complete = [line for line in complete if not self.hidden.match(line)]
            if complete:
                self._write(complete)
                self.destination.terminal.unfinished = None
        if len(rest) > PARTIAL_LINE_LIMIT:
            self.flush()
        elif rest and self.due == float("inf"):
            self.due = time.monotonic() + PARTIAL_LINE_DELAY

    def flush(self) -> None:
        """Pass on the unfinished line as well."""
        if self._pending:
            self._write([self._pending])
            self.destination.terminal.unfinished = self
        self._pending = b""
        self.due = float("inf")

    def _write(self, lines: list[bytes]) -> None:
        start = b""
        if self.prefix:
            unfinished = self.destination.terminal.unfinished
            if unfinished is not self:
                start = self.prefix if unfinished is None else b"\n" + self.prefix
        # One call for all lines, so that no other process's output comes in between.
        self.destination.write(start + self.prefix.join(lines))
