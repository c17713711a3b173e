"""Calls on hosts that are reached through agents: no ssh, and the agents end what they started."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.harness.hosts import Hosts
from tests.harness.launcher import LIMIT, wait_until

SECRET = "5" * 64

# A place: `place.py NUMBER HOST…`. The places exchange their facts through files.
PLACE = f"""
import contextlib, json, os, pathlib, signal, socket, sys, time
import cloudpickle
from hvd_keras import agents

def work(offset):
    from hvd_keras.launch.onhost.worker import find_rank
    rank = find_rank(os.environ)
    print("at work", rank, flush=True)
    while os.environ["WAIT"] == "1":
        time.sleep(0.1)
    return rank + offset, socket.gethostname(), os.environ["OMP_NUM_THREADS"]

def await_files(pattern, count):
    while len(found := sorted(pathlib.Path().glob(pattern))) < count:
        time.sleep(0.05)
    return found

number, *hosts = sys.argv[1:]
call = agents.Call(
    "test", cores=3, environment={{"WAIT": os.environ["WAIT"]}}, run="{"a" * 16}", secret={SECRET!r}
)
with contextlib.closing(agents.Agent(call, hosts[int(number)])) as agent:
    pathlib.Path(f"part-{{number}}").write_text(json.dumps(agent.facts()))
    os.rename(f"part-{{number}}", f"place-{{number}}")
    places = [json.loads(path.read_text()) for path in await_files("place-*", len(hosts))]
    if number == "0":
        function = cloudpickle.dumps((work, (10,), {{}}))
        if isinstance(results := call.start(function, places), Exception):
            raise results
        print(*(cloudpickle.loads(result) for result in results), sep="\\n")
    pathlib.Path(f"done-{{number}}").touch()
    await_files("done-*", len(hosts))
"""


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path):
    """Starts a place on each of these hosts, which are named by their numbers."""
    started = []

    def start(numbers: list[int], wait: bool):
        script = tmp_path / "place.py"
        script.write_text(PLACE)
        names = [hosts[number].address for number in numbers]
        for place, number in enumerate(numbers):
            command = [sys.executable, str(script), str(place), *names]
            environment = {**os.environ, "WAIT": str(int(wait))}
            with (tmp_path / f"out-{place}").open("w") as out:
                started.append(
                    hosts[number].start(command, environment, cwd=tmp_path, stdout=out, stderr=out)
                )
        return started

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_call(hosts: Hosts, tmp_path: Path, start) -> None:
    """Two of the places are on one host; no rank needs ssh, which nobody runs."""
    for host in hosts:
        host.refuse(22)
    processes = start([0, 2, 2, 1], wait=False)
    assert [process.wait(timeout=LIMIT) for process in processes] == [0] * 4
    lines = (tmp_path / "out-0").read_text().splitlines()
    assert sorted(lines[:4]) == [f"[{rank}] at work {rank}" for rank in range(4)]
    names = ["server1", "server3", "server3", "server2"]
    assert lines[4:] == [repr((10 + rank, name, "3")) for rank, name in enumerate(names)]


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_place_ends_the_job(hosts: Hosts, tmp_path: Path, start, killed: int) -> None:
    """As Spark ends the other tasks of a stage, the test kills the other place, too."""
    processes = start([0, 1], wait=True)
    out = tmp_path / "out-0"
    wait_until(lambda: out.read_text().count("at work") == 2, "both ranks")
    hosts[killed].signal(processes[killed], signal.SIGKILL)
    if killed:  # the first place fails by itself, and then waits for nobody
        assert processes[0].wait(timeout=LIMIT) != 0
        assert "RuntimeError: test: " in out.read_text()
    else:
        hosts[1].signal(processes[1], signal.SIGKILL)
    wait_until(lambda: not any(host.processes() for host in hosts), "the end of all processes")
    wait_until(lambda: not any(host.leftovers() for host in hosts), "the removal of files")
