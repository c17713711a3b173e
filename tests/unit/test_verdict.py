"""Which rank is named when several ranks end at once."""

import signal

import pytest

from hvd_keras.launch.follow.outcome import Report, describe_apart, judge, time_to_end
from hvd_keras.launch.onhost.limits import TIE
from hvd_keras.runtime import flight
from hvd_keras.runtime.settings import FOLLOWERS, MPI_LOST


def gone(rank: int, time: float, status: int | None = None) -> Report:
    return Report(rank, status, time, gone=True, host="server")


def noted(report: Report, *marks: str) -> Report:
    """A rank that has told this, but of which the time is that of its end."""
    time = report.time
    for mark in marks:
        report.note(mark)
    report.time = time
    return report


def test_a_report_counts_more_than_an_end_without_one_just_before() -> None:
    reports = [gone(0, 10.0), gone(1, 10.0 + TIE / 2, -signal.SIGSEGV)]
    assert judge(reports, 1).lines[0] == "rank 1 on server failed first: killed by SIGSEGV"
    reports = [gone(0, 10.0), gone(1, 10.0 + 2 * TIE, -signal.SIGSEGV)]
    assert judge(reports, 1).lines[0].startswith("rank 0 on server failed first: killed before")


def test_a_rank_that_was_killed_after_another_has_ended_well_is_named() -> None:
    """At the same moment, mpirun may have killed it because the other has left MPI so."""
    for phase in ("", "ended"):
        well = Report(0, 0, 10.0, phase=phase, gone=True)
        told = judge([well, gone(1, 10.0 + 2 * TIE)], 137).lines
        assert told == ["rank 1 on server failed first: killed before it could report", told[1]]
        assert judge([well, gone(1, 10.0 + TIE / 2)], 137).lines[0].startswith("rank 0 exited")
        waiting = Report(1, None, 10.0 + 2 * TIE, phase="arrived", gone=True)
        assert judge([well, waiting], 137).lines[0].startswith("rank 0 exited")


def test_ranks_that_were_asked_to_end_have_not_succeeded() -> None:
    """Even if they trap SIGTERM, save their work and exit with 0."""
    reports = [Report(rank, 0, 10.0, True) for rank in range(2)]
    verdict = judge(reports, -signal.SIGKILL)
    assert verdict.status == 137
    assert verdict.lines == [
        "the job did not complete; mpirun ended with killed by SIGKILL",
        "ranks 0, 1: exit status 0 after it was asked to end",
    ]
    assert judge(reports, 0).status == 1
    reports[0].stopped = False
    assert (
        judge(reports, 0).lines[0] == "rank 0 exited (status 0) while the others were still running"
    )


def test_ranks_killed_together_have_no_culprit() -> None:
    verdict = judge([gone(0, 10.5), gone(1, 10.0), gone(2, 10.9)], 1)
    assert verdict.lines[0] == (
        "ranks 0, 1, 2 were killed at the same moment, before they could report; it is not known "
        "which failed first"
    )
    assert (verdict.status, verdict.culprit) == (137, None)
    verdict = judge([gone(0, 10.0 + 2 * TIE), gone(1, 10.0)], 1)
    assert verdict.lines[0].startswith("rank 1 on server failed first: killed before")


@pytest.mark.parametrize("status", sorted(FOLLOWERS))
def test_a_script_may_use_the_statuses_of_ranks_that_follow_others(status: int) -> None:
    """They tell that another rank is to blame only where hvd_keras or MPI has chosen them."""
    reports = [Report(0, None, 9.0), Report(1, status, 10.0)]

    def culprit(*marks: str) -> int | None:
        reports[1] = noted(Report(1, status, 10.0), *marks)
        return judge(reports, status).culprit

    assert culprit("asked-for") == 1
    assert judge(reports, status).lines[0] == f"rank 1 failed first: exit status {status}"
    assert judge(reports, status).status == status
    assert culprit("arrived") is None
    # By its number alone, what Open MPI does to a rank cannot be told from what a script does.
    assert culprit("arrived", "joined") == (None if status == MPI_LOST else 1)
    assert culprit("arrived", "joined", "follows") is None
    assert culprit("arrived", "joined", "leaving") is None
    assert culprit("arrived", "joined", "leaving", "ended") == 1


def test_a_killed_mpirun_is_named_and_not_who_lost_a_connection_by_that() -> None:
    lost = noted(gone(0, 10.0, MPI_LOST), "arrived", "joined")
    other = Report(1, -signal.SIGTERM, 10.1, True, host="server")
    lines = [
        judge([lost, other], -signal.SIGKILL, was_killed=was_killed).lines[0]
        for was_killed in (True, False)
    ]
    assert lines[0] == "the job did not complete; mpirun ended with killed by SIGKILL"
    assert lines[1] == "rank 0 lost the connection to another rank"
    for last in (gone(1, 10.1), Report(1, -signal.SIGTERM, 10.1, True, by_signal=True)):
        verdict = judge([gone(0, 10.0), last], -signal.SIGKILL, was_killed=True)
        assert verdict.lines[0] == lines[0]


def test_a_rank_that_hangs_inside_mpi_is_named_by_the_waiting_ranks() -> None:
    def reports(of_others: list[str], of_1: list[str]) -> list[Report]:
        waiting = [noted(Report(rank, 75, 10.0, host="server"), *of_others) for rank in (0, 2)]
        return [waiting[0], noted(gone(1, 20.0), *of_1), waiting[1]]

    told = "ranks 0, 2 timed out waiting for another rank; rank 1 on server has not "
    all_marks = ["arrived", "joined", "leaving"]
    for of_others, of_1, where in (
        (["arrived"], ["arrived"], "returned from hvd.init()"),
        (["arrived"], [], "called hvd.init()"),
        (all_marks, all_marks, "returned from MPI_Finalize"),
    ):
        assert judge(reports(of_others, of_1), 75).lines[0] == told + where


def test_a_job_that_cannot_succeed_ends_when_its_reason_is_known() -> None:
    def report(status: int | None, *marks: str, stopped: bool = False) -> Report:
        return noted(Report(0, status, 10.0, stopped), *marks)

    running = report(None, "arrived", "joined")
    assert not time_to_end([running, report(0)], 1000.0)  # no MPI: it may be done
    assert not time_to_end([running, report(0, "joined", "ended")], 1000.0)
    assert time_to_end([running, report(0, "joined")], 10.0)
    assert time_to_end([running, report(3)], 10.0)
    # MPI_Init waits for a rank that has ended.
    assert not time_to_end([report(None, "arrived"), report(0)], 11.0)
    assert time_to_end([report(None, "arrived"), report(0)], 20.0)
    # The culprit may need time to end.
    assert not time_to_end([running, report(76, "joined", "follows")], 30.0)
    assert time_to_end([running, report(76, "joined", "follows")], 50.0)
    assert time_to_end([running, report(75, "joined", "follows")], 20.0)
    assert time_to_end([running, report(-15, "joined", stopped=True)], 12.0)


def test_a_signal_to_one_worker_is_the_cause() -> None:
    reports = [
        Report(0, -signal.SIGTERM, 12.0, True),
        Report(1, -signal.SIGTERM, 10.0, True, by_signal=True),
    ]
    verdict = judge(reports, 143)
    assert verdict.lines[0].startswith("rank 1 failed first: a signal that hvdrun did not send")
    assert verdict.status == 143


def test_ranks_that_have_not_joined_are_named_if_they_have_ended_well() -> None:
    def ended(rank: int, *marks: str, status: int = 0, stopped: bool = False) -> Report:
        return Report(rank, status, 10.0, stopped, marks=set(marks))

    together = [ended(rank, "asked-for", "joined") for rank in range(3)]
    assert describe_apart(together) == ""
    # A rank that fails may do so before hvd.init(); one that is asked to end has not run for long.
    others = [ended(3, status=1), ended(4, stopped=True)]
    assert describe_apart(together + others) == ""
    said = describe_apart([*together, *others, ended(5, "asked-for")])
    assert said.startswith("rank 5 has not completed hvd.init(), and has run without")
    assert describe_apart([ended(0), ended(1)]).startswith("saw no rank complete")
    assert describe_apart([ended(0)]) == ""
    # hvd.init(comm=[0, 1]): the script has chosen.
    chosen = [ended(rank, "joined", "chosen") for rank in range(2)]
    assert describe_apart([*chosen, ended(2)]) == ""


def test_a_reported_failure_comes_before_a_host_that_only_the_clean_up_has_missed() -> None:
    """The ranks there may have been killed because of it; not if the host was silent before."""
    reports = [Report(0, 3, 10.0, host="a"), Report(1, None, 11.0, host="b")]
    verdict = judge(reports, 1, ["b"])
    assert verdict.lines[0] == "rank 0 on a failed first: exit status 3"
    assert (verdict.status, verdict.culprit) == (3, 0)
    reports[1].lost = "silent"
    assert judge(reports, 1, ["b"]).lines[0].startswith("lost b with rank 1: the network")
    assert judge(reports, 1).lines[0] == "rank 0 on a failed first: exit status 3"
    reports[0].status = None
    reports[1].lost = ""
    assert judge(reports, 1, ["b"]).lines[0].startswith("lost b with rank 1: the network")


def test_a_daemon_that_died_first_may_be_reported_after_a_rank_that_failed_because_of_it() -> None:
    reports = [Report(0, 3, 10.0, host="a"), Report(1, 3, 10.1, host="b")]
    reports[1].orphaned = 10.0 + TIE / 2
    verdict = judge(reports, 1)
    assert verdict.lines[0] == "mpirun's daemon on b died first, above rank 1"
    assert (verdict.status, verdict.culprit) == (1, None)
    reports[1].orphaned = 10.0 + 2 * TIE
    assert judge(reports, 1).lines[0] == "rank 0 on a failed first: exit status 3"


def test_a_package_of_any_folder_is_no_script(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site-packages")  # as of a user, or another venv
    monkeypatch.setattr(flight, "_libraries", flight._libraries.__wrapped__)
    is_script = flight.is_script.__wrapped__
    assert not is_script(str(tmp_path / "site-packages" / "keras" / "ops.py"))
    assert is_script(str(tmp_path / "train.py"))
