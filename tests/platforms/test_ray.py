"""hvd.ray on a real Ray cluster: two raylets of this machine with one CPU each."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import hvd_keras.ray
from hvd_keras.horovod.launching import RayExecutor
from hvd_keras.ray.run import _by_host, _check_resources, _gpus
from tests.harness.launcher import LIMIT, having, wait_until
from tests.harness.raylets import raylets

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "hvd_keras[ray]"')


# In the environment of all that the raylets start.
NAME = "HVD_TEST_RAY"


@pytest.fixture(scope="module")
def cluster(marked: None) -> Iterator[Any]:
    with raylets(2) as started:
        yield started


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process of a job may live after the test."""
    yield
    wait_until(lambda: not _of_jobs(), "the end of all processes of jobs")


def _ours() -> dict[int, str]:
    """The processes of the clusters of this file, and what they have started: command lines."""
    return having(f"{NAME}={os.environ[NAME]}\0")


def _of_jobs() -> list[str]:
    """The ranks, daemons and agents of jobs."""
    parts = re.compile(r"onhost|hvd_keras\.launch|mpirun|prte")
    return [command for command in _ours().values() if parts.search(command)]


@pytest.fixture(scope="module", autouse=True)
def marked() -> Iterator[None]:
    """All that these tests start can be found; what a failed one has left ends, too."""
    os.environ[NAME] = str(os.getpid())
    yield
    for pid in set(_ours()) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    del os.environ[NAME]


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

    for pickler in (cloudpickle, ray.cloudpickle):  # Ray Train uses its own copy
        pickler.register_pickle_by_value(sys.modules[__name__])
    return function


def test_what_cannot_run_is_refused(cluster: Any, nothing_left: None) -> None:
    with pytest.raises(ValueError, match=r"3 ranks need .*room for 2: .*'CPU': 1.0"):
        hvd_keras.ray.run(total, 3)
    with pytest.raises(ValueError, match="num_workers is 0, expected at least 1"):
        hvd_keras.ray.run(total, 0)
    with pytest.raises(ValueError, match="'CPU': 0}, expected more than 0 of one"):
        hvd_keras.ray.run(total, 1, resources={"CPU": 0})
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
def test_horovods_executor(cluster: Any, nothing_left: None) -> None:
    settings = RayExecutor.create_settings(timeout_s=30)
    executor = RayExecutor(settings, num_workers=2, use_current_placement_group=True)
    with pytest.raises(RuntimeError, match=r"expected a call of start\(\) before"):
        executor.run(os.getpid)
    executor.start(extra_env_vars={"MINE": "here"})

    def work(number: int, factor: int = 1) -> tuple[int, str | None]:
        import horovod.tensorflow as hvd

        hvd.init()
        return number + factor * hvd.rank(), os.environ.get("MINE")

    assert executor.run(_by_value(work), [5], {"factor": 3}) == [(5, "here"), (8, "here")]
    executor.shutdown()


def test_what_horovods_executor_refuses() -> None:
    for arguments, words in (
        ({}, "num_workers=None, num_hosts=None; expected exactly one"),
        ({"num_workers": 2, "min_workers": 1}, "has nothing for min_workers=1"),
        ({"num_hosts": 2, "num_workers_per_host": 2}, "has nothing for num_workers_per_host=2"),
    ):
        with pytest.raises(TypeError, match=words):
            RayExecutor(**arguments)
    with pytest.raises(TypeError, match="num_workers_per_host=4"):
        RayExecutor({}, None, 2, 4)  # in Horovod's order
    defaults = {"elastic_timeout": 600, "override_discovery": True}
    with pytest.raises(TypeError, match="ranks do not outlive a call"):
        RayExecutor(num_workers=1, **defaults).start(executable_cls=dict)
    assert "--network-interface=eth0" in RayExecutor.create_settings(nics={"eth0"})["options"]
    with pytest.raises(TypeError, match="expected one interface"):
        RayExecutor.create_settings(nics={"eth0", "eth1"})


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


def _an_actor() -> int:
    """The process of one of the actors."""
    return next(pid for pid, command in _ours().items() if "ray::Place" in command)


def _all_started(file: pathlib.Path) -> bool:
    return all(pathlib.Path(f"{file}-{rank}").exists() for rank in range(2))


def _when_started(file: pathlib.Path, action: Any) -> threading.Thread:
    def wait() -> None:
        while not _all_started(file):
            time.sleep(0.1)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_actor_is_named(cluster: Any, nothing_left: None, tmp_path: pathlib.Path) -> None:
    pids: list[int] = []

    def kill() -> None:
        pids.append(_an_actor())
        os.kill(pids[0], signal.SIGKILL)

    killer = _when_started(tmp_path / "up", kill)
    with pytest.raises(RuntimeError, match=r"the actor of rank \d \(process \d+ on .*\) died"):
        hvd_keras.ray.run(_by_value(wait_for_ever), 2, (str(tmp_path / "up"),))
    killer.join()


# A driver of its own, because a process can use one cluster at a time, and for what ends it.
DRIVER = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})
from tests.platforms import test_ray
test_ray._by_value(test_ray.total)
getattr(test_ray, sys.argv[1])(*sys.argv[2:])
"""


def lose_a_raylet(up: str) -> None:
    with raylets(2) as cluster:
        (other,) = [node for node in cluster.list_all_nodes() if not node.head]
        _when_started(pathlib.Path(up), other.kill_raylet)
        try:
            hvd_keras.ray.run(wait_for_ever, 2, (up,))
        except RuntimeError as error:
            print(f"told: {error}", flush=True)
        assert hvd_keras.ray.run(os.getpid, 1)


@pytest.mark.slow
def test_a_killed_raylet_ends_the_job(nothing_left: None, tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "lose_a_raylet", str(tmp_path / "up")],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert re.search(r"^told: .*the actor of rank \d .* died", done.stdout, re.MULTILINE), done
    assert done.returncode == 0, done


def call_for_ever(address: str, up: str) -> None:
    ray.init(address=address)
    hvd_keras.ray.run(wait_for_ever, 2, (up,))


def train_for_ever(address: str, up: str) -> None:
    ray.init(address=address)
    fit(lambda: wait_for_ever(up), pathlib.Path(up).parent)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["call_for_ever", "train_for_ever"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_its_driver(
    cluster: Any,
    nothing_left: None,
    tmp_path: pathlib.Path,
    function: str,
    number: signal.Signals,
) -> None:
    """Ctrl-C, and a killed driver, at which only Ray's own processes can end the actors."""
    up = tmp_path / "up"
    with (tmp_path / "out").open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, function, cluster.address, str(up)],
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_until(lambda: _all_started(up) or driver.poll() is not None, "the start of both")
        assert driver.poll() is None, (tmp_path / "out").read_text()
        assert _of_jobs()
        os.killpg(driver.pid, number)
        assert driver.wait(LIMIT) != 0
    finally:
        driver.kill()
        driver.wait()


def train(config: dict[str, Any]) -> None:
    import tempfile

    import ray.train
    import tensorflow as tf

    import hvd_keras as hvd

    hvd.init()
    context = ray.train.get_context()
    assert (context.get_world_rank(), context.get_world_size()) == (hvd.rank(), hvd.size())
    assert context.get_local_rank() == hvd.local_rank()
    checkpoint = ray.train.get_checkpoint()
    begin = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            begin = int(pathlib.Path(folder, "step").read_text())
    for step in range(begin, 5):
        number = int(hvd.allreduce(tf.constant(10 ** hvd.rank()), op=hvd.Sum))
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "step").write_text(str(step + 1))
            saved = ray.train.Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
            told = {"step": step, "begin": begin, "number": number}
            ray.train.report(told, checkpoint=saved)
        hvd.barrier()
        # Ray has asked for the first report by now, because it holds one at a time.
        if hvd.rank() == config["culprit"] and step == 2 and begin == 0:
            if config["raises"]:
                raise ValueError("bad luck")
            os.kill(os.getpid(), signal.SIGKILL)


def fit(function: Any, storage: pathlib.Path, failures: int = 0, **config: Any) -> Any:
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    return DataParallelTrainer(
        _by_value(function),
        train_loop_config=config or None,
        backend_config=hvd_keras.ray.TrainConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
    ).fit()


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_ray_train_continues_after_a_killed_worker(
    cluster: Any, nothing_left: None, tmp_path: pathlib.Path, culprit: int
) -> None:
    """Worker 0 is that in which hvdrun runs."""
    metrics = fit(train, tmp_path, failures=1, culprit=culprit, raises=False).metrics
    assert metrics.pop("begin") in (1, 2, 3)
    assert metrics == {"step": 4, "number": 11}


@pytest.mark.slow
def test_ray_train_tells_why_a_worker_failed(
    cluster: Any, nothing_left: None, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(Exception, match=r"ValueError: bad luck"):
        fit(train, tmp_path, culprit=1, raises=True)


def test_any_worker_that_does_not_join_is_an_error(monkeypatch: Any) -> None:
    from hvd_keras.ray import train as module

    class Group:
        def execute(self, function: Any, *_: Any) -> list[Any]:
            return ["", function()] if function is module._join else []

        def execute_single(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(module, "START", 0)
    monkeypatch.setattr(module, "_state", module._State(None, None))
    monkeypatch.setattr("hvd_keras.agents.Call.problem", lambda *_: "")
    with pytest.raises(RuntimeError, match=r"hvd\.ray: hvdrun has not started all ranks"):
        module._Backend().on_start(Group(), hvd_keras.ray.TrainConfig())


def test_a_tenth_of_a_resource_is_there_ten_times() -> None:
    fake = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}])
    _check_resources(fake, {"CPU": 0.1}, 10)


def test_ranks_are_ordered_by_host() -> None:
    assert _by_host(["b", "a", "b", "a"]) == [0, 2, 1, 3]


def test_a_hosts_gpus_are_those_of_its_actors() -> None:
    facts = [("b", ["0"]), ("a", ["3"]), ("b", ["2"]), ("b", ["2"])]
    told = _gpus([{"host": host, "gpus": gpus} for host, gpus in facts])
    assert told == {"b": "0,2", "a": "3"}
    assert _gpus([{"host": "a", "gpus": []}]) == {}
