"""Judges from the ranks' reports how a job ended, and phrases the summary."""

import resource
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_keras import postmortem
from hvd_keras.launch.onhost.limits import DESERTER_GRACE, GRACE, TIE
from hvd_keras.launch.onhost.process import shell_status
from hvd_keras.runtime.settings import (
    DESERTED,
    ERROR,
    FOLLOWERS,
    MPI_LOST,
    REPEATED,
    WAITED_IN_VAIN,
)

# Marks that say where a rank is: inside `hvd.init()`, in the job, inside MPI_Finalize, after it.
PHASES = ("arrived", "joined", "leaving", "ended")

_FOLLOWED = {
    WAITED_IN_VAIN: f"timed out waiting for another rank (exit status {WAITED_IN_VAIN})",
    DESERTED: f"was waiting for a rank that left (exit status {DESERTED})",
    MPI_LOST: f"lost the connection to another rank (exit status {MPI_LOST})",
}


@dataclass
class Report:
    """The state of one rank."""

    rank: int
    status: int | None = None  # its exit status, as in `subprocess`; None while it is unknown
    time: float = field(default_factory=time.monotonic)  # when that was last reported
    stopped: bool = False  # it was asked to end
    marks: set[str] = field(default_factory=set)  # what `settings.tell_hvdrun` has marked
    phase: str = ""  # the latest of these that is one of PHASES
    by_signal: bool = False  # a signal to its worker was the first to ask
    host: str = ""  # in a job on several
    started: bool = True  # its worker has connected
    gone: bool = False  # its worker has ended
    lost: str = ""  # how the connection was lost, as text
    # When mpirun's daemon there was found dead, before the rank was asked to end.
    orphaned: float = float("inf")

    def note(self, mark: str) -> None:
        self.marks.add(mark)
        if mark in PHASES:
            self.phase, self.time = mark, time.monotonic()

    @property
    def error(self) -> str:
        """The name of the error that has ended the rank; empty if it is unknown."""
        return next((mark.removeprefix(REPEATED) for mark in self.marks if ERROR in mark), "")

    @property
    def over(self) -> bool:
        """Whether the rank will send nothing more."""
        return self.gone or self.status is not None

    @property
    def follows(self) -> bool:
        """Whether hvd_keras or MPI, not the script, ended the rank because of another one."""
        if self.status not in FOLLOWERS:
            return False
        mpi_ended_it = self.status == MPI_LOST and self.phase == "joined"
        return "follows" in self.marks or self.waits_in_mpi or mpi_ended_it

    @property
    def waits_in_mpi(self) -> bool:
        """Whether the rank was in MPI_Init or MPI_Finalize, which wait for all."""
        return self.phase in ("arrived", "leaving")

    def describe(self, why_ended: str = "hvdrun") -> str:
        """Return the rank's state as text; `why_ended` says who ended those that were asked to."""
        if not self.started:
            return "did not start"
        if self.status is None:
            return f"lost: {self.lost}" if self.lost else "killed before it could report"
        if self.stopped and self.status in (-signal.SIGTERM, -signal.SIGKILL):
            forced = ", by SIGKILL" * (self.status == -signal.SIGKILL)
            return f"terminated by {why_ended}{forced}"
        end = _FOLLOWED[self.status] if self.follows else _describe_status(self.status)
        return f"{end} after it was asked to end" if self.stopped else end


@dataclass(frozen=True)
class Verdict:
    """The exit status of hvdrun and its last lines."""

    status: int
    lines: Sequence[str]  # the summary; the first line names the cause
    explained: bool = True  # whether the summary names a cause
    culprit: int | None = None  # the rank that failed first, if one did
    waiting: int | None = None  # a rank whose last traceback says more
    apart: str = ""  # which ranks have ended well without having joined the job, as text
    asked: bool = False  # a rank has used hvd_keras


def first_failure(reports: Collection[Report]) -> Report | None:
    """Return the rank that failed first, and not because of another rank; None if there is none."""
    # Ranks that mpirun ended because of it were asked to end, or have not reported an end.
    ended = _ended(reports)
    failed = [one for one in ended if one.status and not one.follows]
    # A rank that vanished without a report failed first, or mpirun killed it because of another
    # rank's end, of which mpirun may learn before we do; because of a good end at once, or never.
    well = [one for one in ended if one.status == 0 and one.phase in ("", "ended")]
    ends = [one.time for one in ended if one not in well] + [one.time - TIE for one in failed]
    for lost in _vanished(reports, min(ends, default=float("inf"))):
        if not any(0 <= lost.time - one.time < TIE for one in well):
            failed.append(lost)
    return min(failed, key=lambda one: one.time, default=None)


def _vanished(reports: Collection[Report], latest: float) -> list[Report]:
    """Ranks whose workers have ended without a report, before this time."""
    return [one for one in reports if one.status is None and one.gone and one.time < latest]


def time_to_end(reports: Collection[Report], now: float) -> bool:
    """Whether the job cannot succeed any more, and what can be known of the reason is known."""
    if first_failure(reports) is not None:
        return True
    # MPI_Init waits for all ranks.
    waits = any(one.phase == "arrived" and now - one.time > GRACE for one in reports)
    for report in reports:
        since = now - report.time
        # It cannot have been hvdrun, which has not yet asked for the end. The others may be asked
        # by the same signal.
        if report.stopped and report.status is not None and since > TIE:
            return True
        # The rank that it followed may take its time to end: a deserter may have exit handlers.
        if report.follows and since > (DESERTER_GRACE if report.status == DESERTED else GRACE):
            return True
        if report.status == 0 and report.phase in ("arrived", "joined", "leaving"):
            return True  # it has left MPI without a word
        if report.status == 0 and not report.phase and since > GRACE and waits:
            return True
    return False


def _ended(reports: Collection[Report]) -> list[Report]:
    return [one for one in reports if one.status is not None and not one.stopped]


def judge(
    reports: Collection[Report],
    mpirun_status: int,
    lost_hosts: Collection[str] = (),
    *,
    was_killed: bool = False,
) -> Verdict:
    """Judge a job that ended without a request from outside, by the reports of all its ranks.

    mpirun's status counts only if the reports do not decide, or if it `was_killed`, not by hvdrun:
    ranks may lose their connections because of that. If one of `lost_hosts`, which could
    not be reached at the end, was silent before, failures of other ranks are consequences.
    """
    apart, asked = describe_apart(reports), any(one.marks for one in reports)
    # A script that was asked to end may save its work and exit with 0; it has not finished.
    early = [one for one in _ended(reports) if one.status == 0]
    if len(early) == len(reports):
        return Verdict(0, [], apart=apart, asked=asked)

    def verdict(status: int, cause: str, named: Report | None = None, **more: Any) -> Verdict:
        others = _describe_others(reports, named)
        return Verdict(status, [cause, *others], apart=apart, asked=asked, **more)

    culprit = first_failure(reports)
    # A rank that has reported its failure comes before a host that only the clean-up has missed.
    is_known = culprit is not None and culprit.status is not None
    on_lost = [one for one in reports if one.host in lost_hosts and (one.lost or not is_known)]
    if on_lost:
        hosts = " and ".join(sorted({one.host for one in on_lost}))
        return verdict(1, f"lost {hosts} with {names(on_lost)}: the network or the host failed")
    orphan = min(reports, key=lambda one: one.orphaned)
    # mpirun, which ends the other ranks because of that, may be faster than the report of it.
    latest = float("inf") if culprit is None else culprit.time + TIE
    if orphan.orphaned < latest and not was_killed:  # its daemons die of that
        return verdict(1, f"mpirun's daemon on {orphan.host} died first, above {names([orphan])}")
    # The daemons of a killed mpirun end the ranks, MPICH's by killing their workers, too; and
    # mpirun may end those that wait for one that has ended well.
    was_ended = was_killed or (early and culprit is not None and culprit.waits_in_mpi)
    if culprit is not None and not (was_ended and culprit.status is None):
        together = _vanished(reports, culprit.time + TIE) if culprit.status is None else []
        if together[1:]:  # as when SLURM kills a step
            cause = (
                f"{names(together)} were killed at the same moment, before they could report; it "
                "is not known which failed first"
            )
            return verdict(shell_status(-signal.SIGKILL), cause, explained=False)
        status = -signal.SIGKILL if culprit.status is None else culprit.status
        how = culprit.describe() if culprit.status is None else _describe_status(status)
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if status < 0 and limit != resource.RLIM_INFINITY:
            how += f" (out of memory? ulimit -v allows {limit // 10**6} MB)"
        elif culprit.status == -signal.SIGKILL:
            how += " (out of memory? see dmesg)"
        # Of ranks with the same error, the one that has printed it.
        culprit = next((one for one in reports if culprit.error in one.marks), culprit)
        cause = f"{names_and_hosts([culprit])} failed first: {how}"
        return verdict(shell_status(status), cause, culprit, culprit=culprit.rank)
    if early:
        return verdict(1, f"{names(early)} exited (status 0) while the others were still running")
    followers = [one for one in _ended(reports) if one.follows]
    if waited := [one for one in followers if one.status == WAITED_IN_VAIN]:
        known = _describe_absent(reports, waited[0].phase) or "the error above names that rank"
        cause = f"{names(waited)} timed out waiting for another rank; {known}"
        told = next((one for one in waited if one.error in one.marks), waited[0])
        return verdict(WAITED_IN_VAIN, cause, waiting=told.rank)
    lost = [one for one in followers if one.status == MPI_LOST]
    if lost and not was_killed:
        cause = f"{names(lost)} lost the connection to another rank"
        return verdict(MPI_LOST, cause, explained=False)
    hit = [one for one in reports if one.stopped and one.by_signal]
    if hit and len(hit) < len(reports) and not was_killed:
        cause = f"{names(hit)} failed first: a signal that hvdrun did not send asked it to end"
        return verdict(128 + signal.SIGTERM, cause)
    cause = f"the job did not complete; mpirun ended with {_describe_status(mpirun_status)}"
    return verdict(shell_status(mpirun_status) or 1, cause, explained=False)


def describe_apart(reports: Collection[Report]) -> str:
    """Say which of several ranks have ended well outside of the job; empty if none has."""
    apart = [one for one in _ended(reports) if one.status == 0 and "joined" not in one.marks]
    # With a `comm` of some ranks, the script has chosen which ones join.
    if len(reports) == 1 or not apart or any("chosen" in one.marks for one in reports):
        return ""
    if len(apart) == len(reports):
        return (
            "saw no rank complete hvd.init(), so these were separate runs: they trained separate "
            "models and overwrote each other's files, if they trained and wrote any"
        )
    have, it = ("have", "they") if apart[1:] else ("has", "it")
    return (
        f"{names(apart)} {have} not completed hvd.init(), and {have} run without the others, "
        f"whose files {it} may have overwritten"
    )


def _describe_absent(reports: Collection[Report], phase: str) -> str:
    """Say which ranks were not where one waited inside MPI; empty if it waited elsewhere."""
    if phase not in ("arrived", "leaving"):
        return ""
    absent, what = [one for one in reports if not one.phase], "not called hvd.init()"
    if not absent:
        absent = [one for one in reports if not one.follows and one.phase == phase]
        what = "not returned from " + ("hvd.init()" if phase == "arrived" else "MPI_Finalize")
    if not absent:
        return ""
    return f"{names_and_hosts(absent)} {'have' if absent[1:] else 'has'} {what}"


def names(reports: Sequence[Report]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return postmortem.names([one.rank for one in reports])


def names_and_hosts(reports: Sequence[Report]) -> str:
    """Return "ranks 1, 2 on server1 and server2"; this host has an empty name."""
    hosts = " and ".join(sorted({one.host for one in reports} - {""}))
    return names(reports) + (f" on {hosts}" if hosts else "")


def _describe_others(reports: Collection[Report], culprit: Report | None) -> list[str]:
    ender = "hvdrun" if culprit is None else f"hvdrun because rank {culprit.rank} failed"
    states: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        if report is not culprit:
            is_same = culprit is not None and culprit.error and report.error == culprit.error
            state = "failed in the same way" if is_same else report.describe(ender)
            states.setdefault((state, report.host), []).append(report)
    return [f"{names_and_hosts(alike)}: {state}" for (state, _), alike in states.items()]


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    named = (number.name for number in signal.Signals if number == -status)
    return f"killed by {next(named, f'signal {-status}')}"  # real-time ones have no names
