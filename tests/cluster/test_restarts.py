"""Faults of processes, daemons, hosts and networks are reported correctly; a restart recovers.

Three hosts train with one rank each. One job meets the fault of each row, one per epoch. Each time
it must end soon, name the culprit, leave nothing behind and restart. The final weights must be
those of an undisturbed run.
"""

import dataclasses
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import cluster, restarting
from tests.harness.cluster import Running
from tests.harness.hosts import Hosts
from tests.harness.launcher import wait_until

SCRIPT = [sys.executable, restarting.__file__]
HOSTS = "server1:1,server2:1,server3:1"
EPOCHS = 3
PAUSE = 0.05  # seconds per step, so that faults happen during training
DEADLINE = 12.0  # seconds; an interruption of 5 s is tolerated
ENVIRONMENT = cluster.environment_of_tests(
    HVD_TIMEOUT_SECONDS=str(int(DEADLINE)), TF_CPP_MIN_LOG_LEVEL="3"
)


def end(output: str) -> str:
    """The digest of the trained state."""
    (digest,) = re.findall(r"ends with (\w+)", output)
    return digest


@dataclasses.dataclass
class Row:
    """A fault and the message that it must cause."""

    summary: str
    fault: Callable[[Running], None]


def killed(words: str, number: int = signal.SIGKILL) -> Callable[[Running], None]:
    return lambda job: job.kill(1, words, number)


FIRST = "hvdrun: rank 1 on server2 failed first: "
LOST = "hvdrun: lost server2 with rank 1: the network or the host failed$"
VAIN = (
    r"timed out waiting for another rank.*\n(.*\n)*"
    r".*rank 1 \(on server2\) (has not submitted|stopped responding)"
)
ROWS = {
    "SIGKILL": Row(
        FIRST + r"killed by SIGKILL \(out of memory\? see dmesg\)$", killed("restarting.py")
    ),
    "worker killed": Row(FIRST + "killed before it could report", killed("onhost.worker")),
    "daemon killed": Row("mpirun's daemon on server2 died first", killed(cluster.DAEMON)),
    "mpirun killed": Row(
        "mpirun ended with killed by SIGKILL", lambda job: job.kill(0, cluster.MPIRUN)
    ),
    "SIGSTOP": Row(VAIN, killed("restarting.py", signal.SIGSTOP)),
    "cut": Row(LOST, lambda job: job.hosts[1].unplug()),
    "reset": Row(LOST, lambda job: job.hosts[1].reset()),
}


class Chain(Running):
    """A job with the faults of these rows, the first one in its second epoch."""

    def __init__(self, hosts: Hosts, folder: Path, rows: list[str]) -> None:
        self.rows = rows
        self.epochs = len(rows) + 2
        command = [*SCRIPT, "checkpoints", str(self.epochs), str(PAUSE)]
        options = ("-H", HOSTS, "--max-restarts", str(len(rows)))
        super().__init__(hosts, folder, cluster.hvdrun(*options, *command), ENVIRONMENT)

    def said(self, start: int) -> str:
        """The output of the job's n-th start, counted from 1."""
        return re.split("^hvdrun: restart ", self.output, flags=re.MULTILINE)[start - 1]

    def left(self, *, between: bool = False) -> set[object]:
        """All processes except hvdrun itself, and all files, on all hosts.

        What stays ``between`` two starts, to help the second one, is left out.
        """
        found: set[object] = set()
        for host in self.hosts:
            lines, files = host.processes(), host.leftovers()
            names = ("onhost.fork_server", "hvdrun: has")  # before and after its imports
            servers = [x for x in lines.values() if between and any(name in x for name in names)]
            for pid, line in lines.items():
                if line not in servers and "-m hvd_keras.hvdrun -H" not in line:
                    found.add(pid)
            found |= {path for path in files if not any(path in line for line in servers)}
        return found


@pytest.fixture(scope="module")
def chain(
    common_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Chain]:
    """The job, with the selected rows."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    rows = [item.callspec.params["row"] for item in items if "row" in item.callspec.params]
    job = Chain(common_hosts, tmp_path_factory.mktemp("chain"), rows)
    yield job
    job.close()
    # A hvdrun that was killed, because some of the tests are deselected, is cleaned up after.
    wait_until(lambda: not job.left(), "nothing is left of the job")


# What a script does ends as on one host, which tests/jobs/test_faults.py shows.
FAST = ["SIGSTOP", "SIGKILL", "cut"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row not in FAST)) for row in ROWS]
)
def test_a_fault_is_reported_and_a_restart_recovers(chain: Chain, row: str) -> None:
    number, fault = chain.rows.index(row) + 1, ROWS[row].fault
    chain.wait_for("begins with epoch ", 3 * number)
    told, before = chain.output.count("hvdrun: "), chain.left(between=True)
    assert len(before) > 6
    chain.wait_for(f"epoch {number} batch 5\n", 1)
    fault(chain)
    chain.wait_for("hvdrun: ", told + 1)
    chain.hosts[1].repair()
    again = (
        f"hvdrun: restart {number} of {len(chain.rows)}: 3 ranks on server1:1, server2:1, server3:1"
    )
    chain.wait_for(again, 1)
    assert before & chain.left(between=True) == set()
    assert re.search(ROWS[row].summary, chain.said(number), re.MULTILINE), chain.said(number)
    chain.wait_for("begins with epoch ", 3 * (number + 1))
    assert f"begins with epoch {number} " in chain.said(number + 1)


@pytest.mark.slow
def test_an_interruption_of_five_seconds_is_tolerated_and_the_result_is_right(
    chain: Chain, tmp_path: Path
) -> None:
    chain.wait_for(f"epoch {chain.epochs - 1} batch 5\n", 1)
    told = chain.output.count("hvdrun: ")
    chain.hosts[1].unplug()
    time.sleep(5)
    chain.hosts[1].plug()
    assert chain.wait() == 0
    assert chain.output.count("hvdrun: ") == told
    assert chain.left() == set()
    command = [*SCRIPT, "checkpoints", str(chain.epochs), "0"]
    undisturbed = cluster.run(
        chain.hosts[0], "-H", HOSTS, *command, folder=tmp_path, env=ENVIRONMENT
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert end(chain.output) == end(undisturbed.stdout)


@pytest.fixture
def job_folder(tmp_path: Path) -> Iterator[Path]:
    """The folder in which hvdrun is started; its output is shown if the test fails."""
    yield tmp_path
    print((tmp_path / "output.txt").read_text(errors="replace")[-6000:])


@pytest.mark.slow
def test_training_continues_on_the_remaining_hosts(hosts: Hosts, job_folder: Path) -> None:
    """One of three is lost for good: learning rate and rows are right for two."""
    command = [*SCRIPT, "checkpoints", str(EPOCHS), str(PAUSE)]
    options = ["-H", HOSTS, "--max-restarts", "1", "--min-np", "2"]
    with cluster.started(hosts, *options, *command, folder=job_folder, env=ENVIRONMENT) as job:
        job.wait_for("epoch 1 batch 5\n", 1)
        hosts[2].unplug()
        assert job.wait() == 0
        assert "hvdrun: left out: server3 cannot be reached by ssh" in job.output
        assert "hvdrun: restart 1 of 1: 2 ranks on server1:1, server2:1\n" in job.output
    trained: Counter[tuple[int, int]] = Counter()
    for line in (job_folder / "seen").read_text().splitlines():
        epoch, _, _, size, rate, rows = line.split()
        assert float(rate) == pytest.approx(restarting.RATE * int(size))
        trained.update((int(epoch), int(row)) for row in rows.split(","))
    assert {row for epoch, row in trained if epoch == 1} == set(range(restarting.ROWS))
    assert set(trained) == {(e, r) for e in range(EPOCHS) for r in range(restarting.ROWS)}
    again = [place for place, count in trained.items() if count > 1]
    assert {epoch for epoch, _ in again} <= {1}
    # At most: the steps since the last checkpoint, and the rest of a step of two ranks.
    assert len(again) <= restarting.BATCH * (3 * (restarting.EVERY + 1) + 2)


@pytest.mark.slow
def test_a_discovered_host_joins_at_a_restart(hosts: Hosts, job_folder: Path) -> None:
    """A host that has crashed does not, until it answers again."""
    script = job_folder / "hosts.sh"
    script.write_text("#!/bin/sh\ncat hosts.txt\n")
    script.chmod(0o755)
    (job_folder / "hosts.txt").write_text("server1:1\nserver2:1\n")
    command = [*SCRIPT, "checkpoints", str(EPOCHS), str(PAUSE)]
    options = ["--host-discovery-script", str(script), "--max-restarts", "1", "-np", "2"]
    with cluster.started(hosts, *options, *command, folder=job_folder, env=ENVIRONMENT) as job:
        job.wait_for("epoch 1 batch 5\n", 1)
        (job_folder / "hosts.txt").write_text("server1:1\nserver2:1\nserver3:1\n")
        hosts[1].unplug()
        job.wait_for("hvdrun: restart 1 of 1: 2 ranks on server1:1, server3:1\n", 1)
        hosts[1].plug()
        assert job.wait() == 0
    assert os.path.exists(job_folder / "checkpoints")
