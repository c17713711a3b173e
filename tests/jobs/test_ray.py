"""hvd.ray on a real Ray cluster: two raylets of this machine with one CPU each."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import hvd_keras.ray
from hvd_keras.ray.run import _by_host, _gpus
from tests.harness.raylets import raylets

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "hvd_keras[ray]"')


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with raylets(2) as started:
        yield started


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process of a job may live after the test."""
    yield
    limit = time.monotonic() + 60
    while left := _of_jobs():
        assert time.monotonic() < limit, left
        time.sleep(0.1)


def _of_jobs() -> list[str]:
    """The ranks, daemons and agents of jobs that this process's Ray cluster runs."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if MARK in environment and re.search(r"hvd_keras|onhost|prte", command):
            found.append(command)
    return found


# In the environment of all that the raylets start.
NAME = "HVD_TEST_RAY"
os.environ.setdefault(NAME, str(os.getpid()))
MARK = f"{NAME}={os.environ[NAME]}".encode()


def total(rate: float) -> tuple[Any, ...]:
    import tensorflow as tf

    import hvd_keras as hvd

    hvd.init()
    number = int(hvd.allreduce(tf.constant(10 ** hvd.rank()), op=hvd.Sum))
    return hvd.rank(), rate * hvd.size(), number, hvd.local_rank()


def test_a_function_runs_on_all_ranks(cluster: Any, nothing_left: None) -> None:
    results = hvd_keras.ray.run(_by_value(total), 2, (0.5,))
    assert results == [(0, 1.0, 11, 0), (1, 1.0, 11, 1)]
    # The resources are free again.
    limit = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < limit, ray.available_resources()
        time.sleep(0.1)


def _by_value(function: Any) -> Any:
    """A function that is pickled with its code, because actors do not find this module."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return function


def test_what_cannot_run_is_refused(cluster: Any, nothing_left: None) -> None:
    with pytest.raises(ValueError, match=r"3 ranks need .*room for 2: .*'CPU': 1.0"):
        hvd_keras.ray.run(total, 3)
    with pytest.raises(ValueError, match="num_workers is 0, expected at least 1"):
        hvd_keras.ray.run(total, 0)
    with pytest.raises(TypeError, match=r"cannot be pickled: .*lock.*inside the function"):
        hvd_keras.ray.run(total, 1, (threading.Lock(),))

    @ray.remote(num_cpus=1)
    class Other:
        def ready(self) -> None:
            pass

    others = [Other.remote() for _ in range(2)]
    ray.get([other.ready.remote() for other in others])
    with pytest.raises(RuntimeError, match=r"did not become free within 1 s; free now: .*CPU"):
        hvd_keras.ray.run(total, 2, wait_seconds=1)
    for other in others:
        ray.kill(other)


@pytest.mark.slow
def test_other_versions_are_refused(
    cluster: Any, nothing_left: None, tmp_path: pathlib.Path
) -> None:
    """The workers find another cloudpickle than the driver."""
    other = tmp_path / "cloudpickle-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudpickle\nVersion: 0.1\n")
    settings = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    with pytest.raises(RuntimeError, match=r"has cloudpickle 0.1; expected [1-9].*, as here"):
        hvd_keras.ray.run(_by_value(total), 1, (1.0,), runtime_env=settings)


def fail() -> None:
    import hvd_keras as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("bad luck")
    hvd.barrier()


@pytest.mark.slow
def test_the_rank_that_fails_is_named(cluster: Any, nothing_left: None) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 .*failed first(.|\n)*ValueError: bad luck"):
        hvd_keras.ray.run(_by_value(fail), 2)


def wait_for_ever(file: str) -> None:
    import hvd_keras as hvd

    hvd.init()
    hvd.barrier()
    with open(f"{file}-{hvd.rank()}", "w") as started:
        started.write(str(os.getpid()))
    if hvd.rank() == 0:
        time.sleep(3600)
    hvd.barrier()


def _place_of_rank_1() -> int:
    """The process of the second actor, whose agent is its child."""
    (found,) = [
        int(line.split()[0])
        for line in subprocess.run(
            ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if "ray::Place" in line and "call" not in line and _is_ours(line.split()[0])
    ]
    return found


def _is_ours(pid: str) -> bool:
    try:
        return MARK in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _when_started(file: pathlib.Path, action: Any) -> threading.Thread:
    def wait() -> None:
        while not all(pathlib.Path(f"{file}-{rank}").exists() for rank in range(2)):
            time.sleep(0.1)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_actor_is_named(cluster: Any, nothing_left: None, tmp_path: pathlib.Path) -> None:
    pids: list[int] = []

    def kill() -> None:
        pids.append(_place_of_rank_1())
        os.kill(pids[0], signal.SIGKILL)

    killer = _when_started(tmp_path / "up", kill)
    with pytest.raises(RuntimeError, match=r"the actor of rank \d \(process \d+ on .*\) died"):
        hvd_keras.ray.run(_by_value(wait_for_ever), 2, (str(tmp_path / "up"),))
    killer.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("other.kill_raylet()", r"RuntimeError: .*the actor of rank \d .* died"),
        ("os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt: $"),
    ],
)
def test_a_killed_raylet_or_ctrl_c_ends_the_job(
    nothing_left: None, tmp_path: pathlib.Path, action: str, told: str
) -> None:
    """In another process, because one process can use one cluster at a time."""
    script = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})
import cloudpickle, hvd_keras.ray
from tests.harness.raylets import raylets
from tests.jobs import test_ray
cloudpickle.register_pickle_by_value(test_ray)
with raylets(2) as cluster:
    (other,) = [node for node in cluster.list_all_nodes() if not node.head]
    up = {str(tmp_path / "up")!r}
    test_ray._when_started(pathlib.Path(up), lambda: {action})
    try:
        hvd_keras.ray.run(test_ray.wait_for_ever, 2, (up,))
    except BaseException as error:
        print(f"told: {{type(error).__name__}}: {{error}}", flush=True)
    assert hvd_keras.ray.run(test_ray.os.getpid, 1)
"""
    environment = os.environ | {NAME: str(os.getpid())}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert re.search(f"told: {told}", done.stdout, re.MULTILINE), done
    assert done.returncode == 0, done


def test_ranks_are_ordered_by_host() -> None:
    assert _by_host(["b", "a", "b", "a"]) == [0, 2, 1, 3]


def test_a_hosts_gpus_are_those_of_its_actors() -> None:
    facts = [("b", ["0"]), ("a", ["3"]), ("b", ["2"]), ("b", ["2"])]
    told = _gpus([{"host": host, "gpus": gpus} for host, gpus in facts])
    assert told == {"b": "0,2", "a": "3"}
    assert _gpus([{"host": "a", "gpus": []}]) == {}
