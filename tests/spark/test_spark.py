"""hvd.spark on two executors: results, rows, faults, and what is refused."""

import os
import pathlib
import re
import signal
import threading

import numpy as np
import pytest

import hvd_keras as hvd
from hvd_keras import agents
from tests.harness.launcher import LIMIT, having, wait_until


def ranks(folder: pathlib.Path) -> dict[int, str]:
    """The processes that write into this folder: the ranks of a test, and what has started them."""
    return having(f"FOLDER={folder}\0")


def test_training(spark, tmp_path, capfd) -> None:
    """Rows from a DataFrame, each on one rank and in one step; the results are in rank order."""
    data = [(number, [float(number), 1.0]) for number in range(103)]
    frame = spark.createDataFrame(data, ["y", "x.1"]).repartition(3)
    rows = hvd.spark.shard(frame, ({"x": "x.1"}, "y"), 8, path=tmp_path / "rows")

    def train(rate):
        import keras

        import hvd_keras as hvd

        hvd.init()
        batches = list(rows.dataset(uneven="pad"))
        used = [
            (int(y), x.tolist())
            for x, y, w in batches
            for x, y, w in zip(x["x"].numpy(), y.numpy(), w.numpy(), strict=True)
            if w
        ]
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(
            rows.dataset(uneven="pad").map(lambda x, y, w: (x["x"] / 103, y / 103, w)),
            epochs=2,
            verbose=0,
            callbacks=callbacks,
            shuffle=False,
        )
        print("end of", hvd.rank(), flush=True)
        return hvd.rank(), len(batches), used, model.get_weights()[0], os.environ["MINE"]

    results = hvd.spark.run(train, (0.1,), num_proc=2, env={"MINE": "a 'b' $c"})
    assert [(rank, steps, mine) for rank, steps, _, _, mine in results] == [
        (rank, 7, "a 'b' $c") for rank in range(2)
    ]
    used = [row for _, _, of_rank, _, _ in results for row in of_rank]
    assert sorted(used) == [(number, x) for number, x in data]
    assert [row for row, _ in used] != sorted(row for row, _ in used)
    assert np.array_equal(results[0][3], results[1][3])
    assert capfd.readouterr().out.splitlines() == ["end of 0"]


def test_the_culprit_is_named(spark) -> None:
    def fail():
        import time

        from hvd_keras.launch.onhost.worker import find_rank

        if find_rank(os.environ) == 1:
            raise KeyError("no such thing")
        time.sleep(1000)

    with pytest.raises(RuntimeError, match=r"^hvd.spark.run: ") as caught:
        hvd.spark.HorovodRunner(np=0).run(fail)
    text = str(caught.value)
    assert "hvdrun: rank 1 failed first: exit status 1" in text
    assert "KeyError: 'no such thing'" in text


def waiter():
    """A function that waits for ever, or only in its first start; pickled with its code."""

    def wait(folder, first_only=False):
        import time

        from hvd_keras.launch.onhost.worker import find_rank

        number = find_rank(os.environ)
        starts = len(list(pathlib.Path(folder).glob(f"start-*-{number}")))
        path = pathlib.Path(folder, f"start-{starts}-{number}")
        path.with_name(f"new-{number}").write_text(str(os.getpid()))
        path.with_name(f"new-{number}").rename(path)
        while not (first_only and starts):
            time.sleep(0.1)
        return starts

    return wait


def test_a_killed_executor_ends_the_job_and_nothing_starts_twice(spark, tmp_path) -> None:
    """Spark repeats the stage, whose ranks must not start; a restart starts all of them anew."""
    arguments = {"num_proc": 2, "env": {"FOLDER": str(tmp_path)}}
    results = []

    def work():
        results.append(hvd.spark.run(waiter(), (tmp_path, True), max_restarts=1, **arguments))

    before = executors(spark)
    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(list(tmp_path.glob("start-0-*"))) == 2, "both ranks")
    first = [int(path.read_text()) for path in tmp_path.glob("start-0-*")]
    lines = ranks(tmp_path).values()
    assert len(lines) > 2
    assert not any(re.search(r"[0-9a-f]{64}", line) for line in lines)  # no secret
    assert len(before) == 2
    os.kill(before[1], signal.SIGKILL)
    thread.join(LIMIT)
    assert results == [[1, 1]]
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in first)
    assert len(list(tmp_path.glob("start-*"))) == 4
    wait_until(lambda: not ranks(tmp_path), "the end of all processes")


def executors(spark) -> list[int]:
    """The processes of this application's executors."""
    identity = spark.sparkContext.applicationId
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "--executor-id" in words and identity in words:
            found.append(int(path.name))
    return sorted(found)


def test_what_is_refused(spark, tmp_path, monkeypatch) -> None:
    lock = threading.Lock()
    for arguments, words in (
        (((lambda: lock),), r"the function or its arguments cannot be pickled: cannot pickle"),
        ((int, (), {}, 0), r"num_proc=0, min_num_proc=None, max_restarts=0; expected at least 1"),
        # One of the two, if another executor has not yet come again.
        ((int, (), {}, 3, 0), r"3 ranks need 3 slots, .* executors have [12] after 0 s"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.spark.run(*arguments)
    with monkeypatch.context() as here:
        here.setattr(agents, "versions", lambda: {"keras": "2.0"})
        with pytest.raises(ValueError, match=r"\(task 0\) has keras 3.*; expected 2.0, as here"):
            hvd.spark.run(int, num_proc=1)
        here.setattr(type(spark.sparkContext), "_active_spark_context", None)
        with pytest.raises(ValueError, match="no SparkContext is active"):
            hvd.spark.run(int, num_proc=1)
    conf = spark.sparkContext._conf
    for name, words in (
        ("spark.ssl.enabled", "spark.ssl.enabled encrypts what Spark sends, but MPI"),
        ("spark.dynamicAllocation.enabled", "has no barrier stages; expected false"),
    ):
        conf.set(name, "true")
        try:
            with pytest.raises(ValueError, match=words):
                hvd.spark.run(int, num_proc=1)
        finally:
            conf.set(name, "false")
    frame = spark.createDataFrame([(1, "a")], ["n", "s"])
    for columns, batch_size, path, words in (
        ("absent", 1, "/x", "expected names of ['n', 's']"),
        ("n", 0, "/x", "batch_size=0; expected"),
        ("n", 1, "x", "path='x'; expected an absolute path or a URI"),
        ("n", 1, str(tmp_path), "cannot be written"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            hvd.spark.shard(frame, columns, batch_size, path=path)


@pytest.mark.slow
def test_busy_slots(spark, tmp_path) -> None:
    """Another job has all slots; it goes on when the refused one has gone."""
    go = tmp_path / "go"

    def occupy(_):
        import time

        (tmp_path / f"busy-{time.monotonic_ns()}").touch()
        while not go.exists():
            time.sleep(0.1)
        return [1]

    context = spark.sparkContext
    counted = []
    job = threading.Thread(
        target=lambda: counted.append(context.parallelize(range(2), 2).mapPartitions(occupy).sum())
    )
    job.start()
    wait_until(lambda: len(list(tmp_path.glob("busy-*"))) == 2, "both tasks")
    with pytest.raises(ValueError, match="no slots became free within start_timeout"):
        hvd.spark.run(int, num_proc=2, start_timeout=1)
    go.touch()
    job.join(LIMIT)
    assert counted == [2]
