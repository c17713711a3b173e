"""hvdrun reaches pods by `kubectl exec`; see tests.harness.kubectl for what is real."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_several_hosts import script
from tests.harness import cluster
from tests.harness.hosts import Hosts
from tests.harness.kubectl import Api
from tests.harness.launcher import wait_until

REACH = ["--remote-shell", "kubectl exec -n train"]


@pytest.fixture
def api(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """No pod has an sshd that would let anybody in."""
    for host in hosts:
        host.refuse(22)
    with Api(hosts, tmp_path) as started:
        monkeypatch.setenv("PATH", f"{tmp_path}:{sys.exec_prefix}/bin:/usr/bin:/bin")
        yield started


def run(hosts: Hosts, folder: Path, text: str, *options: str):
    words = ["--no-init", *REACH, *options, *script(folder, text)]
    return cluster.run(hosts[0], *words, folder=folder)


def test_pods(hosts: Hosts, api: Api, tmp_path: Path) -> None:
    """Results and failures of ranks, and of kubectl itself."""
    done = run(hosts, tmp_path, "print(socket.gethostname())", "-H", "server2:1,server3:1")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] server2", "[1] server3"]
    text = "time.sleep(1000 * (1 - rank))\nsys.exit(3)"
    done = run(hosts, tmp_path, text, "-H", "server2:1,server3:1")
    assert done.returncode == 3
    assert "hvdrun: rank 1 on server3 failed first: exit status 3\n" in done.stderr
    api.deleted.add("server3")
    done = run(hosts, tmp_path, "", "-H", "server2:1,server3:1")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "hvdrun: server3 cannot be reached by kubectl: Error from server (NotFound): pods "
        '"server3" not found; expected that `kubectl exec POD -- true` works, where HOST is POD '
        "or POD.…\n",
    )


@pytest.mark.slow
def test_a_lost_pod(hosts: Hosts, api: Api, tmp_path: Path) -> None:
    """The job restarts in those that are left."""
    text = """
if rank == 1 and not os.path.exists("lost"):
    open("lost", "w").close()
while not os.path.exists("go"):
    time.sleep(0.1)
print(socket.gethostname())
"""
    options = [*REACH, "-H", "server2:1,server3:1", "--max-restarts", "1", "--min-np", "1"]
    with cluster.started(hosts, *options, *script(tmp_path, text), folder=tmp_path) as job:
        wait_until((tmp_path / "lost").exists, "rank 1")
        api.deleted.add("server3")
        hosts[2].unplug()
        job.wait_for("restart 1 of 1", 1)
        (tmp_path / "go").touch()
        assert job.wait() == 0
        assert "hvdrun: left out: server3 cannot be reached by kubectl: Error from" in job.output
        assert "hvdrun: restart 1 of 1: 1 rank on server2:1\n" in job.output
        assert "\n[0] server2\n" in job.output
