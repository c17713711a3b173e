"""hvdrun in SLURM allocations; each of three hosts is a node."""

import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_restarts import ENVIRONMENT, EPOCHS, PAUSE, SCRIPT, end
from tests.harness import cluster, slurm
from tests.harness.hosts import Hosts
from tests.harness.launcher import wait_until
from tests.harness.slurm import Slurm

ALLOCATION = ["salloc", "--quiet", "--nodes=3", "--no-kill"]


@pytest.fixture(scope="module")
def nodes(common_hosts: Hosts) -> Iterator[Slurm]:
    """SLURM, running on the hosts."""
    reason = slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    with Slurm(common_hosts) as running:
        yield running


@pytest.fixture
def ready(nodes: Slurm) -> Iterator[Slurm]:
    """An idle SLURM; no process or file of a test's job may be left on any host."""
    yield nodes
    for host in nodes.hosts:
        host.repair()
    nodes.await_nodes()
    wait_until(lambda: not nodes.left(), f"the end of {nodes.left()}")


def script(folder: Path, text: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, "-u", str(path)]


SUM = """
    import os, sys, hvd_keras as hvd
    hvd.init()
    total = hvd.allreduce([hvd.rank() + 1.0], op=hvd.Sum)
    given = sys.stdin.read()
    print(os.uname().nodename, hvd.local_rank(), hvd.size(), float(total[0]), repr(given))
    """


def test_ranks_on_all_nodes(ready: Slurm, tmp_path: Path) -> None:
    """Placed by SLURM, and by -H."""
    command = cluster.hvdrun(*script(tmp_path, SUM))
    (tmp_path / "text").write_text("text")
    with (tmp_path / "text").open() as stdin:
        done = ready.run([*ALLOCATION, "--ntasks=4", *command], tmp_path, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] server1 0 4 10.0 'text'",
        "[1] server1 1 4 10.0 ''",
        "[2] server2 0 4 10.0 ''",
        "[3] server3 0 4 10.0 ''",
    ]
    assert "hvdrun" not in done.stderr
    command = cluster.hvdrun("-H", "server3:2,server2:1", *script(tmp_path, SUM))
    done = ready.run([*ALLOCATION, "--ntasks-per-node=2", *command], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] server3 0 3 6.0 ''",
        "[1] server3 1 3 6.0 ''",
        "[2] server2 0 3 6.0 ''",
    ]
    step = ["srun", "--nodes=1", "--ntasks=1", *cluster.hvdrun(*script(tmp_path, SUM))]
    done = ready.run([*ALLOCATION, "--ntasks-per-node=2", *step], tmp_path)
    assert "hvdrun: got SLURM_TASKS_PER_NODE=1 in an allocation of 3 nodes" in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


def test_the_first_failure_is_named_with_its_node(ready: Slurm, tmp_path: Path) -> None:
    code = """
        import os, time
        if os.uname().nodename == "server2":
            raise ValueError("bad")
        time.sleep(1000)
        """
    command = cluster.hvdrun(*script(tmp_path, code))
    done = ready.run([*ALLOCATION, "--ntasks=3", *command], tmp_path)
    assert done.returncode == 1
    assert "hvdrun: rank 1 on server2 failed first: exit status 1\n" in done.stderr
    assert "ValueError: bad\n" in done.stderr
    assert "\nhvdrun: rank 0 on server1: " in done.stderr
    assert not ready.left()


@pytest.mark.slow
def test_problems_of_nodes_are_reported_before_anything_starts(
    ready: Slurm, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    ready.hosts[1].run(["mount", "-t", "tmpfs", "tmpfs", str(hidden)])
    folder = hidden / "folder"
    folder.mkdir()
    ready.hosts[2].unplug()
    try:
        command = cluster.hvdrun(*script(tmp_path, "open('touched', 'w')"))
        done = ready.run([*ALLOCATION, "--ntasks=3", *command], folder)
    finally:
        ready.hosts[1].run(["umount", str(hidden)])
    assert done.returncode == 2
    told = dict(re.findall(r"^hvdrun: (\S+) (.*)$", done.stderr, re.MULTILINE))
    assert list(told) == ["server2", "server3"], done.stderr
    assert told["server2"].startswith(f"has no folder {folder}; expected")
    assert told["server3"].startswith("cannot be reached by srun: ")
    assert not (folder / "touched").exists()


def test_ctrl_c_ends_all_ranks(ready: Slurm, tmp_path: Path) -> None:
    command = script(tmp_path, "import time\nprint('ready')\ntime.sleep(1000)")
    with ready.started(ALLOCATION, "-np", "3", *command, folder=tmp_path) as job:
        job.wait_for("ready", 3)
        job.kill(0, r"^\S+ -m hvd_keras.hvdrun -np", signal.SIGINT)
        assert job.wait() == 130
        assert job.output.splitlines()[-1] == "hvdrun: SIGINT received; all ranks were ended"
        assert not ready.left()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["unplug", "kill"])
def test_a_fault_is_reported_and_a_restart_recovers(
    ready: Slurm, tmp_path: Path, fault: str
) -> None:
    """The job restarts after a killed rank; after a lost node, on the remaining nodes."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    command = [*SCRIPT, "checkpoints", str(EPOCHS), "0"]
    calm = ready.run([*ALLOCATION, "-n3", *cluster.hvdrun(*command)], folder, env=ENVIRONMENT)
    assert calm.returncode == 0, calm.stderr
    command = [*SCRIPT, "checkpoints", str(EPOCHS), str(PAUSE)]
    options = ["-np", "3", "--max-restarts", "1", "--min-np", "2"]
    with ready.started(ALLOCATION, *options, *command, folder=tmp_path, env=ENVIRONMENT) as job:
        job.wait_for("epoch 1 batch 5\n", 1)
        if fault == "kill":
            job.kill(1, "restarting.py")
        else:
            ready.hosts[1].unplug()
        assert job.wait() == 0
        assert "begins with epoch 1 " in job.output
        if fault == "kill":
            # SLURM may kill the step before any report arrives.
            told = "hvdrun: rank 1 on server2 failed first: killed by SIGKILL (out of memory?"
            unknown = (
                "hvdrun: ranks 0, 1, 2 were killed at the same moment, before they could report"
            )
            assert told in job.output or unknown in job.output
            assert (
                "hvdrun: restart 1 of 1: 3 ranks on server1:1, server2:1, server3:1\n" in job.output
            )
            assert end(job.output) == end(calm.stdout)
        else:
            assert "hvdrun: lost server2 with rank 1: the network or the host" in job.output
            assert "hvdrun: left out: server2 cannot be reached by srun: " in job.output
            assert "hvdrun: restart 1 of 1: 2 ranks on server1:1, server3:1\n" in job.output
