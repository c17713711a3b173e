"""ProgressLogger: the progress of all ranks, shown by rank 0."""

import contextlib
import os
import pty
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
STEPS = 5
ROWS = 2 + 3 * RANK  # in a batch of this rank
LINE = re.compile(
    r"Epoch (\d)/(\d): (\d+)/(\d+) - \d+s - \d+[mu]?s/step - ([\d.]+) (samples|steps)/s - (.*)"
)


class Hides(training.OwnStep):
    """A model whose train_step does not count the loss that it logs by samples."""

    def train_step(self, data):
        self._loss_tracker.update_state(super().train_step(data)["loss"])
        return {"loss": self._loss_tracker.result()}


def model(kind: type[keras.Sequential] = keras.Sequential, **arguments) -> keras.Model:
    made = kind([keras.Input((5,)), keras.layers.Dense(1)], name="net")
    training.compiled(made, keras.optimizers.SGD(0.01), **arguments)
    return made


def data(known: bool = True) -> tf.data.Dataset:
    """Makes STEPS batches whose number of rows depends on the rank."""
    rows = STEPS * ROWS - RANK  # the last batch is a smaller one
    x, y = np.ones((rows, 5), "float32"), np.full((rows, 1), RANK, "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
    return dataset if known else dataset.filter(lambda x, y: True)


def fit(net: keras.Model, progress: keras.callbacks.Callback, known: bool = True, **arguments):
    average = hvd.callbacks.MetricAverageCallback()
    return training.fit(net, average, progress, data=data(known), **{"epochs": 2, **arguments})


def lines(capsys) -> list[tuple[str, ...]]:
    """Parses each line of rank 0's log; there may be no other lines."""
    text = capsys.readouterr().out
    if RANK > 0:
        assert text == ""
        return []
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [match.groups() for match in found]


@pytest.mark.cases(1)
@pytest.mark.parametrize("verbose", [0, 1, "auto"])
@pytest.mark.parametrize("known", [True, False])
def test_a_log_has_one_line_per_epoch_by_rank_0(capsys, known: bool, verbose) -> None:
    history = fit(model(), hvd.callbacks.ProgressLogger(), known, verbose=verbose)
    for i, (epoch, epochs, step, steps, _, unit, metrics) in enumerate(lines(capsys)):
        assert (epoch, epochs, step, steps, unit) == (str(i + 1), "2", "5", "5", "samples")
        assert metrics == f"loss: {history['loss'][i]:.4f}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("known", [True, False])
def test_samples_of_all_ranks_are_counted(capsys, known: bool, steps_per_execution: int) -> None:
    """Checks the sample counts of training, without validation, on each rank."""
    progress = hvd.callbacks.ProgressLogger()
    net = model(steps_per_execution=steps_per_execution)
    validation = (np.ones((64, 5)), np.ones((64, 1)))
    fit(net, progress, known, validation_data=validation)
    expected = sum(STEPS * (2 + 3 * rank) - rank for rank in range(SIZE))
    *_, last = lines(capsys) or [None]
    if last is not None:
        step, steps, rate, unit, metrics = last[2:]
        assert unit == "samples"
        assert (step, steps) == ("5", "5") or not known
        rounded = 0.5 * progress._seconds  # slow steps have small rates, shown as integers
        assert float(rate) * progress._seconds == pytest.approx(expected, abs=rounded)
        assert "val_loss" in metrics
    assert progress._samples_per_step * progress.seen == expected


def test_after_a_restart_within_an_epoch_the_rate_is_that_of_the_rest(capsys, directory) -> None:
    for crash in (3, 0):
        progress = hvd.callbacks.ProgressLogger()
        saved = hvd.callbacks.Checkpoint(directory, save_freq=2)
        with contextlib.suppress(KeyboardInterrupt):
            training.fit(model(), progress, training.Crash(crash), saved, data=data())
    for *_, rate, unit, _ in lines(capsys):
        assert unit == "samples"
        rest = progress._samples_per_step * (STEPS - 2)
        rounded = 0.5 * progress._seconds
        assert float(rate) * progress._seconds == pytest.approx(rest, abs=rounded)


def test_a_train_step_that_hides_its_samples_gets_steps(capsys) -> None:
    fit(model(Hides), hvd.callbacks.ProgressLogger())
    assert [line[5] for line in lines(capsys)] == ([] if RANK else ["steps", "steps"])


def test_one_rank_that_hides_its_samples_is_enough(capsys) -> None:
    class OnOneRank(Hides):
        def train_step(self, data):
            kind = Hides if RANK == SIZE - 1 else keras.Sequential
            return kind.train_step(self, data)

    fit(model(OnOneRank), hvd.callbacks.ProgressLogger())
    assert [line[5] for line in lines(capsys)] == ([] if RANK else ["steps", "steps"])


def test_an_epoch_that_was_stopped_says_where(capsys) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    net = model()
    net.fit(data(), epochs=3, verbose=0, callbacks=[Stop(), hvd.callbacks.ProgressLogger()])
    assert [line[2:4] for line in lines(capsys)] == ([] if RANK else [("3", "5")])


def test_in_a_terminal_the_bar_moves() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, contextlib.redirect_stdout(terminal):
        fit(model(), hvd.callbacks.ProgressLogger())
    text = b""
    with contextlib.suppress(OSError):  # the end of what a closed terminal has got
        while True:
            text += os.read(ours, 4096)
    os.close(ours)
    if RANK > 0:
        assert text == b""
        return
    assert text.count(b"Epoch ") == 2
    assert b"\b\r" in text
    assert re.search(rb"5/5.* [\d.]+ samples/s - loss: [\d.e-]+ *\r\n$", text)


def test_evaluate_alone_shows_a_bar_without_asking_others(capsys) -> None:
    progress = hvd.callbacks.ProgressLogger()
    net = model()
    fit(net, progress)
    capsys.readouterr()
    if RANK == 0:
        net.evaluate(data(), verbose=0, callbacks=[progress])
        assert "5/5 - " in capsys.readouterr().out
    agree.gather_json("evaluated", None)


def test_an_impossible_verbose() -> None:
    with pytest.raises(ValueError, match="verbose is 3, expected None, 1 or 2"):
        hvd.callbacks.ProgressLogger(verbose=3)


def test_by_default_one_rank_has_the_bar(capsys) -> None:
    net, (x, y) = model(), (np.ones((8, 5)), np.ones((8, 1)))
    for use in (lambda **v: net.fit(x, y, **v), lambda **v: net.evaluate(x, y, **v)):
        use()
        assert bool(capsys.readouterr().out) == (RANK == 0)
        use(verbose=2)
        assert capsys.readouterr().out != ""
