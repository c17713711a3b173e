"""Decides from the ranks' reports how a job ended, and words the summary."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_keras.launch.status import DESERTED, FOLLOWERS, WAITED_IN_VAIN
from hvd_keras.launch.worker import report_path


@dataclass(frozen=True)
class Report:
    """What a rank's worker has recorded (see `worker.write_report`)."""

    status: int | None
    time: float
    stopped: bool

    def describe(self) -> str:
        """The rank's state in words."""
        if self.status is None:
            return "killed before it could report its end"
        end = _describe_status(self.status)
        return f"{end}, when it was asked to end" if self.stopped else end


@dataclass(frozen=True)
class Verdict:
    """The exit status of hvdrun and its last words; `explained` tells whether they name a cause."""

    status: int
    lines: Sequence[str]
    explained: bool


def read_reports(directory: Path, size: int) -> dict[int, Report]:
    """The reports there are so far, by rank."""
    reports = {}
    for rank in range(size):
        try:
            reports[rank] = Report(**json.loads(report_path(directory, rank).read_text()))
        except FileNotFoundError:
            continue
    return reports


def first_failure(reports: dict[int, Report]) -> int | None:
    """The rank that failed first by itself, if any.

    Ranks that mpirun ended because of it have been asked to end, or have left no report of an end;
    those that waited for it say so by their status.
    """
    failed = [rank for rank in _failed(reports) if reports[rank].status not in FOLLOWERS]
    return min(failed, key=lambda rank: reports[rank].time, default=None)


def has_failed(reports: dict[int, Report]) -> bool:
    """Whether the job can no longer succeed."""
    return bool(_failed(reports))


def _failed(reports: dict[int, Report]) -> list[int]:
    return [rank for rank, report in reports.items() if report.status and not report.stopped]


def _ended_early(reports: dict[int, Report]) -> list[int]:
    """Ranks that ended well although others had not: they left these alone."""
    return [rank for rank, report in reports.items() if report.status == 0 and not report.stopped]


def judge(reports: dict[int, Report], size: int, mpirun_status: int) -> Verdict:
    """The verdict on a job of `size` ranks that came to its end without a request from outside.

    The reports decide; mpirun's own status (as in `subprocess`) counts only where they say nothing.
    """
    if len(reports) == size and all(report.status == 0 for report in reports.values()):
        return Verdict(0, [], True)
    culprit = first_failure(reports)
    others = _describe_others(reports, size, culprit)
    if culprit is not None:
        status = reports[culprit].status
        assert status is not None
        cause = f"rank {culprit} failed first: {_describe_status(status)}"
        return Verdict(_shell_status(status), [cause, *others], True)
    if early := _ended_early(reports):
        cause = f"{_names(early)} ended first, without the others"
        return Verdict(1, [cause, *others], True)
    if waited := [rank for rank in _failed(reports) if reports[rank].status == WAITED_IN_VAIN]:
        cause = f"{_names(waited)} waited for another rank in vain; the error above names it"
        return Verdict(WAITED_IN_VAIN, [cause, *others], True)
    cause = f"the job did not complete; mpirun ended with {_describe_status(mpirun_status)}"
    return Verdict(_shell_status(mpirun_status) or 1, [cause, *others], False)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _describe_others(reports: dict[int, Report], size: int, culprit: int | None) -> list[str]:
    states: dict[str, list[int]] = {}
    for rank in range(size):
        if rank != culprit:
            report = reports.get(rank)
            state = report.describe() if report else "left no report, it did not start"
            states.setdefault(state, []).append(rank)
    return [f"{_names(ranks)}: {state}" for state, ranks in states.items()]


def _describe_status(status: int) -> str:
    if status == WAITED_IN_VAIN:
        return f"waited for another rank in vain (exit status {status})"
    if status == DESERTED:
        return f"was left by another rank (exit status {status})"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has a number only
        return f"killed by signal {-status}"


def _shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status
