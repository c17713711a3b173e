"""hvdrun's end of the named pipes and files through which ranks on this host are followed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from hvd_keras.launch.follow import stdin
from hvd_keras.launch.follow.event_loop import Loop
from hvd_keras.launch.follow.outcome import Report
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.onhost.worker_local import arrival_path, report_path, stream_path


class Pipes:
    """The ranks of a job on this host, whose workers (`worker.py`) use a common directory."""

    def __init__(self, size: int, directory: Path) -> None:
        self.size = size
        self.problem = ""
        self._directory = directory
        self._files = contextlib.ExitStack()

    def open(self, loop: Loop, output: Output) -> None:
        """Make the pipes and begin to read them."""
        for rank in range(self.size):
            for name in ("out", "err"):
                path = stream_path(self._directory, rank, name)
                os.mkfifo(path, 0o600)
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._files.callback(os.close, descriptor)
                loop.watch_pipe(descriptor, output.stream(rank, name).feed)
        reader, self.input = stdin.make_pipe(self._directory)
        self._files.callback(os.close, reader)

    def close(self) -> None:
        """Close the pipes."""
        self._files.close()

    def reports(self) -> dict[int, Report]:
        """The reports there are so far, by rank."""
        reports = {}
        for rank in range(self.size):
            try:
                reports[rank] = Report(**json.loads(report_path(self._directory, rank).read_text()))
            except FileNotFoundError:
                continue
            reports[rank].arrived = arrival_path(self._directory, rank).exists()
        return reports

    def check(self) -> bool:
        """Whether something else than the reports shows that the job cannot go on."""
        return False

    def stop(self) -> None:
        """mpirun passes the request on."""

    def over(self) -> bool:
        """Whether nothing more will be heard of any rank."""
        reports = self.reports()
        return len(reports) == self.size and all(
            report.status is not None for report in reports.values()
        )
