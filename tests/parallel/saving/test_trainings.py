"""Checkpoints of an abandoned training never come back, in any order of crashes and damage."""

import contextlib
import random

import h5py
import keras
import numpy as np
import pytest

import hvd_keras as hvd
from hvd_keras.runtime import agree
from hvd_keras.saving import storage
from tests.harness.inputs import damage
from tests.harness.training import Crash

pytestmark = pytest.mark.ranks(1, 2)
RANK = hvd.rank()
UNKNOWN = -1.0  # the weight of a model that restores nothing
STEPS = 3


class Noting(hvd.callbacks.Checkpoint):
    """Notes which training goes on; one that begins gives its number to the weight."""

    number = found = UNKNOWN

    def on_train_begin(self, logs=None) -> None:
        super().on_train_begin(logs)
        self.found = float(self.model.get_weights()[0][0, 0])
        if self.found == UNKNOWN:
            self.model.set_weights([np.full((1, 1), self.number)])


def train(directory, number: float, crash: int, restore: bool, epochs: int) -> float:
    """Returns the number of the training that the model has restored."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full((1, 1), UNKNOWN)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", run_eagerly=True)
    saved = Noting(directory, save_freq=2, restore=restore)
    saved.number = number
    x = np.arange(STEPS * hvd.size(), dtype="float32").reshape(-1, 1)
    data = hvd.data.shard((x, x), batch_size=1)
    with contextlib.suppress(KeyboardInterrupt, OSError):
        model.fit(data, epochs=epochs, verbose=0, callbacks=[saved, Crash(crash)])
    return saved.found


def number_in(path) -> float | None:
    """Returns the number of the training in an intact checkpoint."""
    try:
        storage.verify(path)
    except storage.DamagedError:
        return None
    with h5py.File(path) as file:
        return float(file["variables"]["000000"][()].ravel()[0])


@pytest.mark.cases(4)
@pytest.mark.parametrize("seed", range(24))
def test_what_was_abandoned_never_comes_back(directory, monkeypatch, seed: int) -> None:
    draw, folder, prune = random.Random(seed), directory / "saved", storage.prune
    number = 1.0

    def killed(*arguments) -> None:
        raise OSError("as if the process were killed before older files are removed")

    for _ in range(10):
        act = draw.choice(["go on", "go on", "anew", "anew", "damage", "damage the name"])
        crash, place = draw.choice([0, 1, 2, 4, 6]), draw.randrange(1 << 20)
        epochs, is_killed, which = draw.randrange(1, 6), draw.random() < 0.4, draw.random()
        if act.startswith("damage"):
            files = storage.files(folder) if RANK == 0 else []
            if act != "damage":
                files = [path for path in [folder / "training"] if path.exists()]
            if RANK == 0 and files:
                damage(files[int(which * len(files))], place)
            agree.gather_json("damaged", None)
            continue
        number += act == "anew"
        files = storage.files(folder) if RANK == 0 else []
        intact = {path.name: number_in(path) for path in files}
        mine = [name for name, found in intact.items() if found == number]
        agree.gather_json("looked", None)
        monkeypatch.setattr(storage, "prune", killed if is_killed else prune)
        error, found = None, UNKNOWN
        try:
            found = train(folder, number, crash, act != "anew", epochs)
        except RuntimeError as raised:
            error = str(raised)
        if error is not None:
            assert "all checkpoints are damaged" in error
            # Nothing of this training is usable, or it is not known which one it is.
            assert RANK > 0 or not mine or "training:" in error
            number += 1
            train(folder, number, 0, False, 1)  # as the error advises
        elif RANK == 0:
            assert found == (number if mine and act == "go on" else UNKNOWN), (intact, number)
    training = {number_in(path) for path in storage.files(folder)} if RANK == 0 else set()
    assert len(training - {None}) <= 2  # those of one that a kill has left
