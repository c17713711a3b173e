"""Keras's own callbacks in a real fit."""

import csv
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import missing_calls
from hvd_keras.runtime import agree
from tests.harness import training
from tests.harness.training import compiled

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2)
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to differ from")


def fit(model: keras.Model, callbacks: list, epochs: int = 2, **arguments) -> dict:
    return training.fit(model, *callbacks, epochs=epochs, **arguments)


class Watch(keras.callbacks.Callback):
    """Logs a number that differs by rank, and counts batches."""

    def __init__(self, by_epoch: list[float] = ()) -> None:
        super().__init__()
        self.by_epoch = by_epoch
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None) -> None:
        if self.by_epoch:
            logs["watched"] = self.by_epoch[epoch]


def assert_equal_on_all_ranks(value) -> None:
    everyone = agree.gather_json("must be equal", value)
    assert all(theirs == everyone[0] for theirs in everyone), everyone


def writers(directory: pathlib.Path) -> list[keras.callbacks.Callback]:
    return [
        keras.callbacks.CSVLogger(directory / "log.csv"),
        keras.callbacks.ModelCheckpoint(directory / "deep" / "{epoch}.keras"),
        hvd.callbacks.ModelCheckpoint(directory / "own" / "model.keras", save_freq=4),
    ]


def written(directory: pathlib.Path) -> list[str]:
    paths = directory.rglob("*")
    return sorted(str(path.relative_to(directory)) for path in paths if path.is_file())


def test_writers_write_on_rank_0_alone(directory: pathlib.Path) -> None:
    mine = directory / str(RANK)
    mine.mkdir()
    model = compiled()
    x, y = np.full((4, 5), RANK), np.full((4, 1), RANK)
    average = hvd.callbacks.MetricAverageCallback()
    history = fit(model, [average, *writers(mine)], validation_data=(x, y))
    names = ["deep/1.keras", "deep/2.keras", "log.csv", "own/model.keras"]
    assert written(mine) == (names if RANK == 0 else [])
    if RANK == 0:
        with open(mine / "log.csv") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["val_loss"]) for row in rows] == history["val_loss"]
        saved = keras.models.load_model(mine / "deep" / "2.keras")
        np.testing.assert_array_equal(training.flat(saved), training.flat(model))
    assert_equal_on_all_ranks(history["val_loss"])


def test_tensorboard_writes_on_rank_0_alone(directory: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    mine = directory / str(RANK)
    (mine / "train").mkdir(parents=True)
    board = keras.callbacks.TensorBoard(
        mine,
        histogram_freq=1,
        write_images=True,
        write_steps_per_second=True,
        update_freq=2,
        profile_batch=(2, 3),
        embeddings_freq=1,
    )
    model = compiled()
    x, y = np.full((4, 5), RANK), np.full((4, 1), RANK)
    fit(model, [hvd.callbacks.MetricAverageCallback(), board], validation_data=(x, y))
    training.assert_bit_identical_on_all_ranks(model)
    assert any("validation" in path for path in written(mine)) == (RANK == 0)
    assert bool(written(mine)) == (RANK == 0)


@several
def test_a_model_of_one_rank_is_written_by_that_rank(directory: pathlib.Path) -> None:
    mine = directory / str(RANK)
    mine.mkdir()
    compiled()  # this patches Keras's callbacks
    model = training.dense_model()
    model.compile("sgd", "mse")
    x, y = np.ones((4, 5)), np.ones((4, 1))
    model.fit(x, y, verbose=0, callbacks=writers(mine)[:2])
    assert {path.name for path in mine.rglob("*.*")} == {"log.csv", "1.keras"}
    if RANK == 1:  # no other comes here
        before = model.get_weights()
        own = hvd.callbacks
        callbacks = [own.BroadcastGlobalVariablesCallback(0), own.MetricAverageCallback()]
        with hvd.local_fit():
            model.fit(x, y, verbose=0, callbacks=[*callbacks, own.ProgressLogger()])
            with pytest.raises(ValueError, match=r"alone \(hvd.local_fit\), and expected the"):
                model.fit(x, y, verbose=0, callbacks=[own.Checkpoint(directory)])
        assert np.any(model.get_weights()[0] != before[0])
        model.evaluate(x, y, verbose=0)


@pytest.mark.parametrize("cls", [keras.callbacks.ModelCheckpoint, hvd.callbacks.ModelCheckpoint])
def test_the_best_checkpoint_is_chosen_by_all_ranks_metrics(directory: pathlib.Path, cls) -> None:
    # On rank 0 alone the second epoch looks worse; over all ranks it is better.
    watch = Watch([5.0, 6.0] if RANK == 0 else [5.0, 1.0])
    best = cls(
        directory / "best.weights.h5",
        monitor="watched",
        mode="min",
        save_best_only=True,
        save_weights_only=True,
    )
    model = compiled()
    fit(model, [watch, hvd.callbacks.MetricAverageCallback(), best])
    agree.gather_json("written", None)
    saved = training.dense_model()
    saved.load_weights(directory / "best.weights.h5")
    assert np.array_equal(training.flat(saved), training.flat(model)) == (SIZE > 1)
    assert best.best == (3.5 if SIZE > 1 else 5.0)


@several
@pytest.mark.parametrize("whose", ["all", "one", "each"])
def test_files_of_own_callbacks_are_written_by_one_rank(directory, monkeypatch, whose) -> None:
    told = []
    monkeypatch.setattr(missing_calls, "tell", lambda text, *_: told.append(text))

    class Log(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if RANK == 0 or whose != "one":
                name = f"{RANK}.txt" if whose == "each" else "log.txt"
                with open(os.devnull, "w"), open(directory / name, "a") as file:
                    file.write(f"{epoch}\n")

    fit(compiled(), [Log(), keras.callbacks.CSVLogger(directory / "log.csv")])
    assert [("callback Log writes" in text, "log.txt" in text) for text in told] == (
        [(True, True)] if whose == "all" else []
    )


@several
def test_callbacks_of_keras_print_on_one_rank(capfd) -> None:
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=99, verbose=1)
    rate = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=99, verbose=1)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate, verbose=1)
    fit(compiled(), [hvd.callbacks.MetricAverageCallback(), schedule, rate, stop], epochs=3)
    printed = capfd.readouterr().out
    assert ("early stopping" in printed) == ("setting learning rate" in printed) == (RANK == 0)
    assert (stop.verbose, rate.verbose, schedule.verbose) == (1, 1, 1)


@several
def test_derived_callbacks_run_their_own_part_everywhere(directory: pathlib.Path) -> None:
    class Counting(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            ranks.append(float(hvd.allreduce(float(RANK), op=hvd.Sum, name="theirs")))
            assert self.model.built

    class Flushing(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            self.csv_file.flush()
            keys.append(self.keys)

    ranks: list[float] = []
    keys: list[list[str]] = []
    every = [Counting(directory / f"{RANK}.keras"), Flushing(directory / f"{RANK}.csv")]
    fit(compiled(), every)
    assert ranks == [sum(range(SIZE))] * 2
    assert "loss" in keys[1]
    agree.gather_json("written", None)
    assert {path.name for path in directory.iterdir()} == {"0.keras", "0.csv"}


@several
def test_callbacks_of_a_callback_list_know_what_those_of_a_list_do() -> None:
    """Also those that fit adds, such as that of sync_every; one's own may call others itself."""
    model, watch, composite = training.dense_model(), Watch(), Watch()
    composite.callbacks = [Watch()]
    if RANK == 0:  # makes a model that it does not train
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync_every=2), loss="mse")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    given = keras.callbacks.CallbackList([broadcast, watch, composite])
    x, y = training.mine(model)
    history = model.fit(x, y, batch_size=training.BATCH, verbose=0, callbacks=given).history
    assert watch.params["steps"] == watch.batches == composite.batches == training.STEPS
    assert list(history) == ["loss"]


@several
def test_backup_and_restore_is_refused_on_all_ranks(directory: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"Use hvd\.callbacks\.Checkpoint\('"):
        fit(compiled(), [keras.callbacks.BackupAndRestore(directory)])


# The mean over 2 ranks stays 1; that over 3 ranks falls from 4/3; one rank sees it rise.
WATCHED = [0.0, 1.0, 2.0, 3.0] if RANK == 0 else [2.0, 1.0, 0.0, -1.0]
ORDERS = ["behind", "without", "before"]


def with_metric_average(order: str, callback: keras.callbacks.Callback) -> list:
    average = hvd.callbacks.MetricAverageCallback()
    orders = {"behind": [average, callback], "before": [callback, average], "without": [callback]}
    mine = [callback] * (RANK == 0)
    return {**orders, "on one rank": mine, "before, on one rank": [*mine, average]}[order]


@pytest.mark.cases(3)
@pytest.mark.parametrize("order", ["before, on one rank", "on one rank", *ORDERS])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_early_stopping_stops_all_ranks_after_the_same_epoch(order: str, shape) -> None:
    watch = Watch([np.full(shape, value)[()] for value in WATCHED])
    stop = keras.callbacks.EarlyStopping("watched", mode="max", patience=0)
    history = fit(compiled(), [watch, *with_metric_average(order, stop)], epochs=4)
    assert_equal_on_all_ranks(watch.batches)
    assert watch.batches == {1: 4, 2: 2, 3: 2}[SIZE] * training.STEPS
    if order in ("without", "on one rank"):  # others see what this rank has logged
        assert history["watched"] == WATCHED[: len(history["watched"])]


@several
def test_early_stopping_by_an_array_is_an_error() -> None:
    watch = Watch([np.array([0.1, 0.2])])
    stop = keras.callbacks.EarlyStopping("watched", mode="max")
    with pytest.raises(ValueError, match="decide by one number, but 'watched' is an array"):
        fit(compiled(), [watch, *([stop] if RANK == 0 else [])], epochs=1)


@pytest.mark.parametrize("order", ORDERS)
def test_reduce_lr_on_plateau_gives_all_ranks_the_same_rate(order: str) -> None:
    reduce = keras.callbacks.ReduceLROnPlateau("watched", mode="max", factor=0.5, patience=1)
    callbacks = [Watch(WATCHED), *with_metric_average(order, reduce)]
    history = fit(compiled(), callbacks, epochs=4)
    falling = [0.01, 0.01, 0.005, 0.0025] if SIZE > 1 else [0.01] * 4
    np.testing.assert_allclose(history["learning_rate"], falling, rtol=1e-6)
    assert_equal_on_all_ranks(history["learning_rate"])


def test_early_stopping_by_what_one_rank_alone_has_measured() -> None:
    watch = Watch([0.0, 1.0, 2.0, 3.0] if RANK == SIZE - 1 else [])
    stop = keras.callbacks.EarlyStopping("watched", mode="min", patience=0)
    history = fit(compiled(), [watch, stop], epochs=4)
    assert watch.batches == 2 * training.STEPS
    assert ("watched" in history) == (RANK == SIZE - 1)


def test_a_rank_that_stops_by_its_own_metric_stops_all() -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and RANK == SIZE - 1:
                self.model.stop_training = True

    watch = Watch()
    history = fit(compiled(), [Stop(), watch], epochs=4)
    assert watch.batches == 2 * training.STEPS
    assert len(history["loss"]) == 2


def test_a_tensorboard_with_the_users_scalars(directory: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")

    class Board(keras.callbacks.TensorBoard):
        def on_epoch_end(self, epoch, logs=None):
            assert pathlib.Path(self._log_write_dir) == mine
            with self._train_writer.as_default():
                tf.summary.scalar("own", float(RANK), step=epoch)
            super().on_epoch_end(epoch, logs)
            seen.append(float(hvd.allreduce(float(RANK), op=hvd.Sum, name="own part")))

    seen: list[float] = []
    mine = directory / str(RANK)
    board = Board(mine)
    fit(compiled(), [board])
    assert type(board) is Board
    assert seen == [sum(range(SIZE))] * 2
    assert bool(written(mine)) == (RANK == 0)


def test_orbax_checkpoints_are_written_by_rank_0_alone(directory: pathlib.Path) -> None:
    class Checkpoint(keras.callbacks.OrbaxCheckpoint):  # without orbax
        def __init__(self) -> None:
            keras.callbacks.Callback.__init__(self)
            self.save_freq = "epoch"

        def on_train_end(self, logs=None) -> None:
            """Wait for nothing."""

    wrote: list[int] = []
    checkpoint = Checkpoint()
    original = keras.callbacks.OrbaxCheckpoint.on_epoch_end
    keras.callbacks.OrbaxCheckpoint.on_epoch_end = lambda self, epoch, logs=None: wrote.append(
        epoch
    )
    try:
        fit(compiled(), [checkpoint])
    finally:
        keras.callbacks.OrbaxCheckpoint.on_epoch_end = original
    assert wrote == ([0, 1] if RANK == 0 else [])


def test_evaluate_writes_on_rank_0_alone(directory: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    model = compiled()
    x, y = training.data(model, SIZE)
    mine = directory / str(RANK)
    for call in (model.evaluate, model.predict):
        data = (x, y) if call == model.evaluate else (x,)
        call(*data, verbose=0, callbacks=[keras.callbacks.TensorBoard(mine)])
    assert bool(written(mine)) == (RANK == 0)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_nan_of_one_rank_terminates_all_after_the_same_batch(steps_per_execution: int) -> None:
    model = compiled(steps_per_execution=steps_per_execution)
    x, y = training.mine(model)
    if RANK == SIZE - 1:
        y[2 * training.BATCH] = np.nan  # in the third step
    watch = Watch()
    callbacks = [hvd.callbacks.MetricAverageCallback(), keras.callbacks.TerminateOnNaN(), watch]
    model.fit(
        x, y, batch_size=training.BATCH, epochs=3, verbose=0, shuffle=False, callbacks=callbacks
    )
    assert watch.batches == {1: 3, 2: 2}[steps_per_execution]
    # All ranks are at the same point: the next collective succeeds.
    assert float(hvd.allreduce(float(RANK), op=hvd.Sum)) == sum(range(SIZE))


@several
def test_a_nan_raises_on_all_ranks() -> None:
    model = compiled()
    x, y = np.ones((8, 5)), np.full((8, 1), np.nan if RANK == SIZE - 1 else 1.0)
    with pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 0"):
        model.fit(x, y, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN(raise_error=True)])
