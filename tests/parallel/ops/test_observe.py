"""Counters and the timeline, as the ranks of one job see them."""

import itertools
import json
import os
import pathlib
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
LATE = SIZE - 1


def counted(kind: str) -> dict[str, float]:
    nothing = dict.fromkeys(("requests", "bytes", "waiting_seconds", "moving_seconds"), 0)
    return hvd.stats()["collectives"].get(kind, nothing)


def lateness() -> list[dict[str, float]]:
    hvd.barrier()  # the times of the latest request are known after the next one
    return hvd.stats()["ranks"]


def come_late(times: int) -> None:
    for _ in range(times):
        hvd.barrier()
        if RANK == LATE:
            time.sleep(0.3)
        hvd.allreduce(tf.ones(3), name="late")


def slices(path: pathlib.Path) -> list[dict]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_requests_and_this_ranks_bytes_are_counted() -> None:
    before = counted("allreduce"), counted("allgather")
    for _ in range(3):
        hvd.allreduce(tf.ones((5, 2)), name="counted")
    hvd.allgather(tf.ones((1 + RANK, 4), tf.float64), name="rows")
    after = counted("allreduce"), counted("allgather")
    changes = [{k: new[k] - old[k] for k in new} for old, new in zip(before, after, strict=True)]
    assert [(c["requests"], c["bytes"]) for c in changes] == [(3, 3 * 40), (1, 32 * (1 + RANK))]
    assert all(c["moving_seconds"] > 0 and c["waiting_seconds"] >= 0 for c in changes)
    assert hvd.stats()["rank"] == RANK
    assert len(hvd.stats()["ranks"]) == SIZE


def test_all_ranks_know_who_came_last() -> None:
    before, waited = lateness(), counted("allreduce")["waiting_seconds"]
    come_late(4)
    after, waited = lateness(), counted("allreduce")["waiting_seconds"] - waited
    change = [
        (b["last"] - a["last"], b["awaited_seconds"] - a["awaited_seconds"])
        for a, b in zip(before, after, strict=True)
    ]
    assert change[LATE][0] >= 4
    assert change[LATE][1] > sum(seconds for _, seconds in change[:LATE])
    everyone = agree.gather_json("waited", [change, waited])
    assert all(
        [times for times, _ in theirs] == [times for times, _ in change] for theirs, _ in everyone
    )
    assert min(seconds for _, seconds in everyone[:LATE]) > everyone[LATE][1]


def test_the_timeline_shows_all_ranks(directory) -> None:
    path = directory / "timeline.json"
    hvd.allreduce(tf.ones(1), name="before")
    hvd.start_timeline(path)
    hvd.allgather(tf.ones((1 + RANK, 4)), name="rows")
    come_late(2)
    hvd.stop_timeline()
    hvd.allreduce(tf.ones(1), name="after")
    found = slices(path)
    rows = {e["pid"]: e for e in found if e["name"] == "allgather rows"}
    assert {rank: e["args"]["bytes"] for rank, e in rows.items()} == {
        rank: 16 * (1 + rank) for rank in range(SIZE)
    }
    assert not {"before", "after"} & {e["args"]["name"] for e in found}
    late = [e for e in found if e["args"]["name"] == "late"]
    assert len(late) == SIZE * 2 * 2  # of each rank, each time: waited and moved
    assert {e["args"]["last_rank"] for e in late} == {LATE}
    waits = [e for e in late if e["name"] == f"wait for rank {LATE}"]
    assert sorted(e["pid"] for e in waits) == sorted(2 * list(range(LATE)))
    own = [e["dur"] for e in late if e["name"] == "wait"]
    assert max(own) < min(e["dur"] for e in waits)


def test_slices_of_a_row_do_not_overlap(directory) -> None:
    path = directory / "timeline.json"
    hvd.start_timeline(path)

    def reduce(name: str) -> None:
        for _ in range(20):
            hvd.allreduce(tf.ones(10_000), name=name)

    # Two threads, so that ranks submit in different orders and negotiate.
    threads = [threading.Thread(target=reduce, args=(name,)) for name in ("a", "b")]
    for thread in threads if RANK % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    hvd.barrier()  # brings what rank 0 does not know yet
    hvd.stop_timeline()
    found = slices(path)
    for rank in range(SIZE):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["pid"] == rank)
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in itertools.pairwise(row))
        for name in "ab":
            assert sum(e["name"] == f"allreduce {name}" for e in found if e["pid"] == rank) == 20


def test_a_process_set_has_a_row_of_its_own(directory) -> None:
    path = directory / "timeline.json"
    some = hvd.add_process_set(range(SIZE - 1))
    hvd.start_timeline(path)
    if some.included():
        hvd.allreduce(tf.ones(3), name="of some", process_set=some)
        hvd.barrier(process_set=some)
    hvd.stop_timeline()
    found = [e for e in slices(path) if e["name"] == "allreduce of some"]
    rows = sorted((e["pid"], e["tid"]) for e in found)
    assert rows == [(rank, some.process_set_id) for rank in range(SIZE - 1)]
    assert found[0]["args"]["process_set"] == some.process_set_id


def test_a_timeline_that_one_rank_cannot_write_leaves_nothing(directory) -> None:
    path = directory / "t.json"
    taken = directory / f"t.json.rank-{LATE}"
    if RANK == LATE:
        taken.mkdir()
    before = os.listdir("/proc/self/fd")
    hvd.barrier()
    with pytest.raises(ValueError, match=r"cannot make .*t.json': Is a directory"):
        hvd.start_timeline(path)
    assert os.listdir("/proc/self/fd") == before
    hvd.barrier()
    assert [*directory.iterdir()] == [taken]
    with pytest.raises(ValueError, match="is a folder"):
        hvd.start_timeline(directory)


def test_errors_of_rank_0_reach_all_ranks(directory) -> None:
    with pytest.raises(ValueError, match=r"cannot make .*none/t.json': No such file"):
        hvd.start_timeline(directory / "none" / "t.json")
    hvd.start_timeline(directory / "t.json", mark_cycles=True)
    by = r"a timeline is being written already: '.*/t.json', by hvd.start_timeline. Call hvd.stop"
    with pytest.raises(ValueError, match=by):
        hvd.start_timeline(directory / "other.json")
    hvd.stop_timeline()
    hvd.stop_timeline()  # once more does no harm
    hvd.start_timeline(directory / "t.json")
    hvd.stop_timeline()


class Dawdle(keras.callbacks.Callback):
    """Late by far more than a loaded machine makes a rank late; in the last epoch alone."""

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if RANK == LATE and self.epoch == 2:
            time.sleep(0.3)

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.epoch = epoch


def test_stats_logger_writes_each_epoch(directory) -> None:
    model = training.dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(
        *training.mine(model),
        batch_size=training.BATCH,
        epochs=3,
        verbose=0,
        callbacks=[Dawdle(), hvd.callbacks.StatsLogger(directory / str(RANK))],
    )
    agree.gather_json("written", None)
    assert [path.name for path in directory.iterdir()] == ["0"]
    logged: dict[str, dict[int, float]] = {}
    for path in (directory / "0" / "train").iterdir():  # as keras.callbacks.TensorBoard does
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                logged.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    assert all(list(epochs) == [0, 1, 2] for epochs in logged.values())
    # One request per step, after those of the first step, and at most two at the end of an epoch.
    requests = training.STEPS
    assert logged["hvd/requests"][1] == logged["hvd/requests"][2]
    assert 0 <= logged["hvd/requests"][2] - requests <= 2
    parameters = sum(np.prod(weight.shape) for weight in model.trainable_weights)
    assert 0 <= logged["hvd/bytes"][2] - requests * 4 * parameters <= 1000
    assert logged["hvd/moving_seconds"][2] > 0
    late = {rank: logged[f"hvd/rank_{rank}/awaited_seconds"][2] for rank in range(SIZE)}
    assert max(late, key=lambda rank: late[rank]) == LATE
    assert logged[f"hvd/rank_{LATE}/last"][2] >= training.STEPS / 2
    scores = {rank: logged[f"hvd/rank_{rank}/straggler"][2] for rank in range(SIZE)}
    assert 1 >= scores[LATE] == max(scores.values()) > 0
    assert logged["hvd/waiting_seconds"][2] > 0
