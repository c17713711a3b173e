"""The timeline and the table of statistics of real jobs, including killed ones."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from hvd_keras import timeline
from hvd_keras.launch.follow import statistics
from tests.harness.launcher import wait_until

LATE = 1
TIMES = 4

SCRIPT = """
import numpy as np
import hvd_keras as hvd

hvd.init()
hvd.observe.training["loss"] = float("nan")
for step in range(4):
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(0.3)
    hvd.allreduce(np.ones(1000, "float32"), name="gradients")
hvd.allgather(np.ones((1 + hvd.rank(), 1000)), name="last")
"""

ENDLESS = """
import numpy as np
import hvd_keras as hvd

hvd.init()
open(f"pid-{rank}.new", "w").write(str(os.getpid()))
os.rename(f"pid-{rank}.new", f"pid-{rank}")
while True:
    hvd.allreduce(np.ones(1000, "float32"), name="gradients")
"""


def slices(path: pathlib.Path) -> list[dict]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_a_job_with_a_late_rank(hvdrun) -> None:
    path = hvdrun.folder / "a \udcff.json"  # is no text
    job = ("-np", "2", "--oversubscribe", "--stats", "--timeline", path.name)
    job += ("--postmortem", "postmortem", sys.executable, hvdrun.script(SCRIPT))
    folder = hvdrun.folder / "new" / "stats"
    also = {"HVD_STATS_DIRECTORY": str(folder)}
    done = hvdrun.run(*job, env=hvdrun.environment | also, errors="surrogateescape", status=0)

    for rank in range(2):
        text = (folder / f"stats-{rank}.json").read_text()
        numbers = json.loads(text, parse_constant=pytest.fail)
        assert (numbers["rank"], numbers["ranks"][LATE]["last"] >= TIMES) == (rank, True)
    assert "postmortem" not in done.stderr
    assert not list((hvdrun.folder / "postmortem").iterdir())  # nothing went wrong
    assert "hvdrun: timeline: python -m hvd_keras.timeline 'a \udcff.json'\n" in done.stderr
    found = [e for e in slices(path) if e["args"]["name"] == "gradients"]
    assert len(found) == 2 * TIMES * 2  # of each rank, each time: waited and moved
    assert sum(e["name"] == f"wait for rank {LATE}" for e in found) == TIMES
    last = [e for e in slices(path) if e["name"] == "allgather last"]
    assert {e["pid"]: e["args"]["bytes"] for e in last} == {0: 8000, 1: 16000}

    table = [line.split() for line in done.stderr.partition("hvdrun: statistics")[2].splitlines()]
    assert ["allreduce", str(TIMES), "32", "kB"] in [row[:4] for row in table]
    (gathered,) = (row for row in table if row and row[0] == "allgather")
    # Small ones have come before, by which the ranks have agreed on the timeline.
    assert 24 <= float(gathered[2]) < 25
    assert gathered[3] == "kB"
    of_rank = {row[0]: row for row in table if row and row[0] in "01" and len(row) > 5}
    times = {rank: int(row[row.index("times") - 1]) for rank, row in of_rank.items()}
    assert times["1"] >= TIMES
    assert f"The others waited for rank {LATE} in" in done.stderr


def test_another_init_has_another_timeline(hvdrun) -> None:
    text = """
        import hvd_keras as hvd
        for name in "ab":
            hvd.init()
            hvd.allreduce(1.0, name=name)
            try:
                hvd.start_timeline("own.json")
            except ValueError as error:
                print(error)
            if name == "b": os.kill(os.getpid(), 9)
            hvd.shutdown()
        """
    for number in 2, 3:
        (hvdrun.folder / f"t-{number}.json.rank-1").touch()  # of an earlier job
    job = hvdrun.run("-np", "1", "--timeline", "t.json", sys.executable, hvdrun.script(text))
    assert {path.name for path in hvdrun.folder.glob("t*.json*")} == {"t.json", "t-2.json"}
    for file, name in ("t.json", "a"), ("t-2.json", "b"):
        assert name in {e["args"]["name"] for e in slices(hvdrun.folder / file)}
        assert f"/{file}', by hvdrun --timeline or HVD_TIMELINE. Leave out" in job.stdout


@pytest.mark.parametrize(
    "killed", [[0], *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ([1], [0, 1]))]
)
def test_the_timeline_survives_kill_9(hvdrun, killed: list[int]) -> None:
    path = hvdrun.folder / "timeline.json"
    process = hvdrun.start(2, ENDLESS, "--timeline", "timeline.json")
    pids = [hvdrun.folder / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(pid.exists() for pid in pids), "both ranks run")
    grows = [hvdrun.folder / f"timeline.json.rank-{rank}" for rank in range(2)]
    wait_until(lambda: all(one.stat().st_size > 300_000 for one in grows), "the timeline grows")
    for rank in killed:
        os.kill(int(pids[rank].read_text()), signal.SIGKILL)
    process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    assert not any(one.exists() for one in grows)  # hvdrun has merged them
    found = slices(path)
    assert len(found) > 4000
    moved = [sum(e["pid"] == rank and "gradients" in e["name"] for e in found) for rank in (0, 1)]
    assert abs(moved[0] - moved[1]) <= 1


def test_hosts_have_clocks_of_their_own(tmp_path) -> None:
    path = tmp_path / "a [1].json"
    names = ("gradients", "größe".encode(), b"\xff" * 300)
    for rank, clock in enumerate((5, 7 * 10**15)):
        os.close(timeline.begin(path, rank, 3))
        with (tmp_path / f"a [1].json.rank-{rank}").open("ab") as file:
            for turn, name in enumerate(names):
                start = clock + 1_000_000_000 * (turn + 1)
                waited = 2_000_000 if rank == turn % 2 else 20_000
                title = b"allreduce " + (name.encode() if isinstance(name, str) else name)
                times = start - waited, start, start + 1000 * (1 + rank)
                one = timeline.Served(0, turn, *times, 8, title)
                file.write(timeline._SERVED.pack(*one))
            file.write(b"of a full disk")
    (tmp_path / "a [1].json.rank-3").write_text('[3, 4, "of an earlier job"]\n')
    own = tmp_path / "a [1].json.rank-0.gz"  # the user's
    own.touch()
    lacks = f"the timeline {path} lacks ranks 2"
    assert timeline.merge(path, keep=True) == lacks
    found = slices(path)
    assert timeline.merge(path) == lacks
    assert {*tmp_path.iterdir()} == {path, own}
    assert slices(path) == found
    assert {event["pid"] for event in found} == {0, 1}
    for turn, name in enumerate(("gradients", "größe")):
        mine = [e for e in found if e["args"]["name"] == name]
        late = 1 - turn % 2
        assert {e["args"]["last_rank"] for e in mine} == {late}
        begun = {e["ts"] for e in mine if e["name"] == f"allreduce {name}"}
        assert len(begun) == 1  # on both ranks
        waits = {e["pid"]: (e["name"], e["dur"]) for e in mine if "wait" in e["name"]}
        assert waits == {late: ("wait", 20.0), 1 - late: (f"wait for rank {late}", 2000.0)}
    assert timeline.merge(path) == ""
    assert slices(path) == found


@pytest.mark.parametrize("path", ["", "none/timeline.json", "."])
def test_hvdrun_refuses_a_timeline_without_a_folder(hvdrun, path: str) -> None:
    done = hvdrun.run("-np", "1", "--timeline", path, "python", "-c", "1")
    assert (done.stdout, done.returncode) == ("", 2)
    assert f"--timeline got {path!r}; expected the path of a file" in done.stderr


def test_statistics_of_a_job_that_left_some_or_none(hvdrun) -> None:
    for name in ("timeline.json", "timeline.json.rank-0"):  # of an earlier job
        (hvdrun.folder / name).write_text('[0, 1, "host"]\n')
    job = ("-np", "1", "--stats", "--timeline", "timeline.json")
    done = hvdrun.run(*job, "python", "-c", "1")
    assert (done.returncode, done.stdout) == (0, "")
    assert "timeline" not in done.stderr
    assert "no statistics: no rank has sent any." in done.stderr
    spent = {"requests": 3, "bytes": 5e9, "waiting_seconds": 1.0, "moving_seconds": 0.5}
    late = {"last": 7, "awaited_seconds": 0.1}
    own = {
        "rank": 1,
        "cores": [0, 1],
        "seconds": 4.0,
        "collectives": {"allreduce": spent},
        "late": late,
    }
    told = statistics.Statistics(size=2)
    told.take(1, "host", own)
    table = statistics.table(told)
    assert "1.0 s  25%   0.5 s  12%    7 times" in table
    assert "5 GB" in table
    assert table.endswith("No statistics of rank 0.")


def test_a_link_opens_the_timeline_in_perfetto(tmp_path) -> None:
    """The page of Perfetto fetches the file once, and nothing else."""
    file = tmp_path / "a timeline.json"
    os.close(timeline.begin(file, 0, 1))  # of a rank that may go on writing
    command = [sys.executable, "-m", "hvd_keras.timeline", str(file)]
    with socket.socket() as listener:  # the port is Perfetto's choice and may be in use
        try:
            listener.bind(("127.0.0.1", timeline.PORT))
        except OSError:
            pytest.skip(f"port {timeline.PORT} is in use")
        listener.listen()
        refused = subprocess.run(command, capture_output=True, text=True)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"cannot serve {file} at port {timeline.PORT}" in refused.stderr
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    link = server.stdout.readline().strip()
    page, _, url = link.partition("/#!/?url=")
    assert page == "https://ui.perfetto.dev"
    idle = socket.create_connection(("127.0.0.1", timeline.PORT))  # of a browser, in advance
    with idle, pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.rpartition("/")[0] + "/other.json", timeout=30)
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == page
        assert len(json.loads(answer.read())) == 2
    assert server.wait() == 0
    assert (tmp_path / f"{file.name}.rank-0").exists()
