"""Faults of processes, daemons, hosts and networks: told rightly, and survived by a restart.

Three hosts train with a rank each. Every row brings one fault in the second epoch. The job must end
soon, name the culprit, leave nothing, start again, and reach the weights of an undisturbed run.
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

from hvd_keras.launch.channel import SILENCE
from tests.harness import cluster, restarting
from tests.harness.cluster import Running
from tests.harness.hosts import Hosts

SCRIPT = [sys.executable, restarting.__file__]
HOSTS = "server1:1,server2:1,server3:1"
EPOCHS = 3
PAUSE = 0.05  # seconds a step, so that faults come while it trains
DEADLINE = 12.0  # seconds; 5 s without a network are survived
# What a busy machine may add. An idle one adds less than three seconds.
SLACK = 20.0
WHERE = {"PYTHONPATH": str(Path(__file__).parents[2]), "TF_CPP_MIN_LOG_LEVEL": "3"}
ENVIRONMENT = cluster.environment(HVD_TIMEOUT_SECONDS=str(int(DEADLINE)), **WHERE)


def end(output: str) -> str:
    """The digest of the trained state."""
    (digest,) = re.findall(r"ends with (\w+)", output)
    return digest


@pytest.fixture(scope="module")
def undisturbed(common_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of a run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [*SCRIPT, "checkpoints", str(EPOCHS), "0"]
    done = cluster.run(common_hosts[0], "-H", HOSTS, *command, folder=folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return end(done.stdout)


@dataclasses.dataclass
class Row:
    """A fault from outside, or one that the script has; what is said; when it must be known."""

    summary: str
    fault: Callable[[Running], None] | None = None
    within: float = 0.0  # seconds


def killed(words: str, number: int = signal.SIGKILL) -> Callable[[Running], None]:
    return lambda job: job.kill(1, words, number)


FIRST = "hvdrun: rank 1 on server2 failed first: "
LOST = "hvdrun: lost server2 with rank 1: the network or the host failed$"
VAIN = r"waited for another rank in vain.*\n(.*\n)*.*rank 1 \(on server2\) has not submitted"
ROWS = {
    "SIGKILL": Row(FIRST + "killed by SIGKILL$", killed("restarting.py")),
    "worker killed": Row(FIRST + "killed before it could report", killed("launch.remote")),
    "daemon killed": Row("mpirun's daemon on server2 died first", killed("prted ")),
    "mpirun killed": Row(
        "mpirun ended with killed by SIGKILL", lambda job: job.kill(0, "prterun -n")
    ),
    "SIGSTOP": Row(VAIN, killed("restarting.py", signal.SIGSTOP), DEADLINE),
    "cut": Row(LOST, lambda job: job.hosts[1].unplug(), SILENCE),
    "reset": Row(LOST, lambda job: job.hosts[1].reset(), SILENCE),
    "exception": Row(FIRST + r"exit status 1\n(.*\n)*ValueError: bad luck\nhvdrun"),
    "MemoryError": Row(FIRST + r"exit status 1\n(.*\n)*MemoryError"),
    "SIGSEGV": Row(FIRST + "killed by SIGSEGV$"),
    "sys.exit(0)": Row(r"hvdrun: rank 1 ended first, without the others$|rank 1 has left the job"),
    "sys.exit(3)": Row(FIRST + "exit status 3$"),
    "os._exit(0)": Row("hvdrun: rank 1 ended first, without the others$"),
    "other shape": Row(r"failed first: exit status 1\n(.*\n)*.*float32\[2\]"),
    "skipped": Row(r"rank 1 .*(\n.*)*hvdrun: restart 1", None, DEADLINE),
}


@pytest.fixture
def job_folder(tmp_path: Path) -> Iterator[Path]:
    """Where hvdrun is started."""
    yield tmp_path
    if (tmp_path / "output.txt").exists():
        print((tmp_path / "output.txt").read_text(errors="replace")[-6000:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_fault_is_told_and_survived(
    hosts: Hosts, job_folder: Path, undisturbed: str, name: str
) -> None:
    row = ROWS[name]
    command = [*SCRIPT, "checkpoints", str(EPOCHS), str(PAUSE), *([] if row.fault else [name])]
    options = ["-H", HOSTS, "--max-restarts", "1"]
    with cluster.started(hosts, *options, *command, folder=job_folder, env=ENVIRONMENT) as job:
        if row.fault is not None:
            job.wait_for("epoch 1 batch 5\n", 1)
            row.fault(job)
        else:
            job.wait_for("epoch 1 batch 4\n", 1)
        start = time.monotonic()
        job.wait_for("hvdrun: ", 1)
        seconds = time.monotonic() - start
        print(f"{name}: told {seconds:.1f} s after the fault")
        assert seconds < row.within + SLACK
        hosts[1].repair()
        assert job.wait() == 0
        assert re.search(row.summary, job.output, re.MULTILINE)
        assert "hvdrun: restart 1 of 1: 3 ranks on server1:1, server2:1, server3:1" in job.output
        assert "begins with epoch 1 " in job.output
        assert end(job.output) == undisturbed
        assert [(host.processes(), host.leftovers()) for host in hosts] == [({}, [])] * 3


@pytest.mark.slow
def test_five_seconds_without_network_are_survived(
    hosts: Hosts, job_folder: Path, undisturbed: str
) -> None:
    command = [*SCRIPT, "checkpoints", str(EPOCHS), str(PAUSE)]
    with cluster.started(hosts, "-H", HOSTS, *command, folder=job_folder, env=ENVIRONMENT) as job:
        job.wait_for("epoch 1 batch 5\n", 1)
        hosts[1].unplug()
        time.sleep(5)
        hosts[1].plug()
        assert job.wait() == 0
        assert "hvdrun: " not in job.output
        assert end(job.output) == undisturbed


@pytest.mark.slow
def test_training_goes_on_with_the_hosts_that_are_left(hosts: Hosts, job_folder: Path) -> None:
    """One of three is lost for good: the rate and the rows are right for two."""
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
    # Since the last checkpoint, what was being trained, and the rest of a step of two ranks.
    assert len(again) <= restarting.BATCH * (3 * (restarting.EVERY + 1) + 2)


@pytest.mark.slow
def test_a_discovered_host_takes_part_after_a_restart(hosts: Hosts, job_folder: Path) -> None:
    """And a host that has crashed does not, until it is there again."""
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
