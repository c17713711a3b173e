"""Checkpoints are written while training goes on."""

import errno
import itertools
import shutil
import signal
import sys
import threading

import keras
import numpy as np
import pytest

import hvd_keras as hvd
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import values_of
from hvd_keras.saving import storage
from tests.harness import training
from tests.parallel.saving.test_restart import (
    EPOCHS,
    RANK,
    STEPS,
    adam,
    assert_same_state,
    build,
    interrupt,
    train,
)


@pytest.fixture
def directory(directory):
    """Returns a folder that does not exist yet; only rank 0 uses it."""
    return directory / "checkpoints"


class Slow:
    """Lets a file be written only when training has made so many more steps."""

    def __init__(self, monkeypatch, steps: int, error: OSError | None = None) -> None:
        self.callback = keras.callbacks.LambdaCallback(on_train_batch_end=self._count)
        self.batches = 0  # of all epochs
        self.passed = threading.Event()
        self._steps, self._error = steps, error
        self._write = storage.write
        monkeypatch.setattr(storage, "write", self._wait)

    def _count(self, batch, logs) -> None:
        self.batches += 1
        if self.batches % self._steps == 0:
            self.passed.set()

    def _wait(self, *arguments) -> None:
        assert self.passed.wait(timeout=60), "training waits for the file"
        if self._error:
            raise self._error
        self._write(*arguments)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_goes_on_while_a_file_is_written(directory, monkeypatch, jit_compile) -> None:
    """The file has the values of the moment of the save; nothing is lost by an exception."""
    options = {"run_eagerly": False, "jit_compile": jit_compile}
    undisturbed = build(adam, **options)
    train(undisturbed, None)
    with monkeypatch.context() as patch:
        slow = Slow(patch, steps=3)
        export = hvd.callbacks.ModelCheckpoint(directory.parent / "model.keras", save_freq=3)
        saved = hvd.callbacks.Checkpoint(directory, save_freq=2)
        interrupt(build(adam, **options), saved, STEPS - 1, slow.callback, export)
    again, checkpoint = build(adam, **options), hvd.callbacks.Checkpoint(directory)
    train(again, checkpoint)
    if RANK == 0:
        assert storage.files(directory)[0].name == f"checkpoint-0000{EPOCHS}-0000000.h5"
    assert_same_state(again, undisturbed)


@pytest.mark.host("values of a GPU are copied")
@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [adam, lambda: keras.optimizers.Lion(0.01, weight_decay=0.1)])
def test_large_values_are_not_copied_for_a_file(directory, make) -> None:
    """Each update leaves the values before it where they are, and has the same bits."""
    ended = []
    for callbacks in ([], [hvd.callbacks.Checkpoint(directory)]):
        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((600,)), keras.layers.Dense(500)])
        net.compile(hvd.DistributedOptimizer(make()), "mse", run_eagerly=False)
        places: list[list[int]] = []

        def note(batch, logs, own=net, places=places) -> None:
            # Decayed weights are replaced twice in a step, so they may be back where they were.
            weights = [] if own.optimizer.weight_decay else own.weights
            large = [v for v in (*weights, *own.optimizer.variables) if len(v.shape) == 2]
            places.append([values_of(v).ctypes.data for v in large])

        data = np.random.default_rng(RANK).normal(size=(2, 8, 600))
        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=note))
        net.fit(data[0], data[1, :, :500], batch_size=2, verbose=0, callbacks=callbacks)
        ended.append(net)
    pairs = itertools.chain(*map(zip, places, places[1:]))  # of one variable, in two steps
    assert all(before != after for before, after in pairs)
    assert_same_state(*ended)


def test_a_signal_that_ends_fit_waits_for_the_file(directory, monkeypatch) -> None:
    slow = Slow(monkeypatch, steps=1000)

    def terminate(batch, logs) -> None:
        if batch == 2:
            threading.Timer(0.5, slow.passed.set).start()
            signal.raise_signal(signal.SIGTERM)

    end = keras.callbacks.LambdaCallback(on_train_batch_end=terminate)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    try:
        with pytest.raises(SystemExit):
            train(build(adam), hvd.callbacks.Checkpoint(directory, save_freq=2), end)
    finally:
        signal.signal(signal.SIGTERM, before)
    if RANK == 0:
        assert [path.name for path in directory.iterdir()] == ["checkpoint-00000-0000002.h5"]


def test_an_error_of_the_writing_thread_comes_at_the_same_step_on_all_ranks(
    directory, monkeypatch
) -> None:
    slow = Slow(monkeypatch, STEPS + 3, OSError(errno.EIO, "bad disk") if RANK == 0 else None)
    with pytest.raises(OSError, match=r"cannot write: rank 0: \[Errno 5\] bad disk") as caught:
        train(build(adam), hvd.callbacks.Checkpoint(directory), slow.callback)
    assert caught.value.errno == errno.EIO
    steps = agree.gather_json("steps", slow.batches)
    # At the end of the second epoch at the latest, where the next file would begin.
    assert STEPS < steps[0] <= 2 * STEPS, steps
    assert len(set(steps)) == 1, steps


def test_two_checkpoints_of_one_fit(directory, monkeypatch) -> None:
    undisturbed = build(adam)
    train(undisturbed, None)
    slow = Slow(monkeypatch, steps=STEPS)
    frequent = hvd.callbacks.Checkpoint(directory / "frequent", save_freq=STEPS - 1)
    others = [hvd.callbacks.Checkpoint(directory / "seldom", save_freq=STEPS - 2), slow.callback]
    interrupt(build(adam), frequent, 2 * STEPS - 1, *others)
    monkeypatch.undo()
    # Both are within the second epoch, and the newer one restores.
    for names in ("seldom", "frequent"), ("frequent", "seldom"), ("seldom",):
        copy = directory.parent / " ".join(names)
        if RANK == 0:
            shutil.copytree(directory, copy)
        hvd.barrier()
        again, steps = build(adam), training.Crash(0)
        train(again, *(hvd.callbacks.Checkpoint(copy / name) for name in names), steps)
        assert -steps.left == (EPOCHS - 2) * STEPS + (2 if names == ("seldom",) else 1)
        assert_same_state(again, undisturbed)


@pytest.mark.parametrize("name", ["checkpoint-00001-0000000.h5", "checkpoint-00009-0000000.h5"])
def test_a_directory_in_which_another_job_saves(directory, name) -> None:
    """Its checkpoint stays, whether this job has written one of the same name or not."""
    elsewhere = directory.parent / "elsewhere" / name

    def write(epoch, logs) -> None:
        if (RANK, epoch) == (0, 1):
            storage.write(elsewhere, {}, [], "another")
            elsewhere.replace(directory / name)

    other = keras.callbacks.LambdaCallback(on_epoch_end=write)
    with pytest.raises(RuntimeError, match=f"another job, or the script, has written {name} into"):
        train(build(adam), hvd.callbacks.Checkpoint(directory, keep=1), other)
    hvd.barrier()
    if RANK == 0:
        found = {path.name: storage.training_of(path) for path in storage.files(directory)}
        assert found[name] == "another"
        assert "checkpoint-00001-0000000.h5" in found
