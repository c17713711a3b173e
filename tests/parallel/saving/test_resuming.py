"""What a fit writes and decides, if it crashes at any batch and is started again."""

import csv
import pathlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from tests.harness import training

pytestmark = pytest.mark.ranks(1, 2)
RANK, SIZE = hvd.rank(), hvd.size()
STEPS, EPOCHS, BATCH = 5, 5, 4
callbacks = keras.callbacks


def built() -> keras.Model:
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1)])


def compiled() -> keras.Model:
    keras.utils.set_random_seed(RANK)
    model = built()
    training.set_weights(model, seed=RANK)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    # A few steps take less time than tracing.
    model.compile(optimizer, loss="mse", metrics=["mae"], run_eagerly=True)
    return model


def rows(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(number, 5)), generator.normal(size=(number, 1))


def fit(folder: pathlib.Path, saves: int | str, last: str, *more) -> keras.Model:
    """Trains with callbacks that count batches and epochs, and that remember the best."""
    model = compiled()
    best = {"save_best_only": True, "monitor": "loss"}
    used = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        callbacks.ModelCheckpoint(folder / "batch-{epoch}-{batch}.keras", save_freq=3),
        callbacks.ModelCheckpoint(
            folder / "best-{epoch}-{val_loss:.4f}.weights.h5", **best, save_weights_only=True
        ),
        callbacks.CSVLogger(folder / "log.csv", append=True),
        callbacks.TensorBoard(folder / "events", update_freq=1, write_graph=False),
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8 if epoch % 2 else rate),
        callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5),
        callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
    ]
    saved = [hvd.callbacks.Checkpoint(folder / "state", save_freq=saves)]
    used = [*saved, *used] if last == "first" else [*used, *saved]
    model.fit(
        hvd.data.shard(rows(1, SIZE * STEPS * BATCH), batch_size=BATCH),
        epochs=EPOCHS,
        verbose=0,
        # Each validation leaves out other rows.
        validation_data=hvd.data.shard(rows(2, SIZE * 8 + 3), batch_size=4, uneven="trim"),
        callbacks=[*used, *more],
    )
    return model


@pytest.mark.parametrize("append", [False, True])
def test_a_log_that_begins_anew_has_a_header(directory, append: bool) -> None:
    """After a restart: without append, or if the log has been removed."""
    path = directory / "log.csv"

    def fit_until(epochs: int) -> None:
        log = callbacks.CSVLogger(path, append=append)
        data = hvd.data.shard(rows(1, SIZE * STEPS * BATCH), batch_size=BATCH)
        saved = hvd.callbacks.Checkpoint(directory / "state")
        training.fit(compiled(), log, saved, data=data, epochs=epochs)

    fit_until(2)
    if RANK == 0 and append:
        path.unlink()
    agree.gather_json("removed", None)
    fit_until(4)
    if RANK == 0:
        assert [row["epoch"] for row in csv.DictReader(path.open())] == ["2", "3"]


class InValidation(callbacks.Callback):
    def on_test_begin(self, logs=None) -> None:
        raise KeyboardInterrupt


def test_the_logs_of_an_epoch_without_a_batch_left(directory) -> None:
    """Saved after the last batch of data of unknown length, of which only a step sees the end."""
    data = tf.data.Dataset.from_tensor_slices(rows(1 + RANK, STEPS * BATCH)).batch(BATCH)

    def logs(folder: str, *more) -> dict[str, list[float]]:
        saved = hvd.callbacks.Checkpoint(directory / folder, save_freq=STEPS)
        used = [hvd.callbacks.MetricAverageCallback(), *more, saved]
        how = {"data": data.filter(lambda *_: True), "validation_data": rows(9, 8), "epochs": 2}
        return training.fit(compiled(), *used, **how)

    with pytest.raises(KeyboardInterrupt):
        logs("broken", InValidation())
    assert logs("broken") == logs("whole")


class AtTheEnd(callbacks.Callback):
    """Crashes when CSVLogger has written the row of an epoch, and before it is saved.

    Not of the first epoch, before which there is nothing to go back to.
    """

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.left = epochs

    def on_epoch_end(self, epoch, logs=None) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def events(folder: pathlib.Path) -> dict[tuple[str, str, int], float]:
    """Returns the scalars by name and step; a step that is written again has the same value."""
    found: dict[tuple[str, str, int], float] = {}
    for path in sorted((folder / "events").rglob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                key = path.parent.name, value.tag, event.step
                if value.tag == "epoch_steps_per_second" or not value.HasField("tensor"):
                    continue
                number = float(tf.make_ndarray(value.tensor))
                assert found.setdefault(key, number) == number, key
    return found


def files(folder: pathlib.Path) -> dict[str, list[np.ndarray]]:
    found = {}
    for path in sorted(folder.glob("*-*")):
        model = built() if path.suffix == ".h5" else keras.models.load_model(path, compile=False)
        if path.suffix == ".h5":
            model.load_weights(path)
        found[path.name] = model.get_weights()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(12))
def test_files_and_logs_are_those_of_a_run_without_a_crash(directory, seed: int) -> None:
    draw = random.Random(seed)
    saves, place = draw.choice([1, 2, 3, 4, "epoch"]), draw.choice(["first", "last"])
    whole, broken = directory / "whole", directory / "broken"
    if RANK == 0:
        whole.mkdir()
        broken.mkdir()
    agree.gather_json("made", None)
    expected = fit(whole, saves, place)
    for _ in range(2):
        try:
            at_the_end = AtTheEnd(draw.randrange(1, 3))
            after = 1 + draw.randrange(STEPS * EPOCHS // 2)
            crash = draw.choice([training.Crash(after), at_the_end])
            got = fit(broken, saves, place, crash)
        except KeyboardInterrupt:
            got = None
    got = got or fit(broken, saves, place)
    training.assert_same(got.get_weights(), expected.get_weights())
    again = fit(broken, saves, place)  # when nothing is left
    training.assert_same(again.get_weights(), expected.get_weights())
    if RANK > 0:
        return
    theirs, mine = files(whole), files(broken)
    assert mine.keys() == theirs.keys()
    for name, weights in theirs.items():
        for one, other in zip(mine[name], weights, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    logs = [list(csv.DictReader((path / "log.csv").open())) for path in (broken, whole)]
    assert logs[0] == logs[1]
    assert events(broken) == events(whole)
