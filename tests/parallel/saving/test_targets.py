"""Keras's functions that save a model write where they do without hvd_keras."""

import os
import pathlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree

pytestmark = pytest.mark.ranks(1, 2)
RANK = hvd.rank()


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.set_weights([np.arange(6.0).reshape(3, 2), np.ones(2)])  # as a broadcast leaves them
    return made


def checkpointed(path) -> None:
    made = model()
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    x = np.full((4, 3), RANK, "float32")
    made.fit(x, x[:, :2], verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(path)])


def loaded(path) -> np.ndarray:
    if path.name.endswith(".weights.h5"):
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        made.load_weights(path)
        return made.get_weights()[0]
    return keras.models.load_model(path).get_weights()[0]


SAVE = {
    "save": (lambda path: model().save(path), "model.keras"),
    "h5": (lambda path: keras.saving.save_model(model(), path), "model.h5"),
    "save_weights": (lambda path: model().save_weights(path), "model.weights.h5"),
    "ModelCheckpoint": (checkpointed, "model.keras"),
}


@pytest.mark.parametrize("name", ["model.keras", "model.hdf5", "new/m.h5", "model.weights.h5"])
def test_all_ranks_may_call_keras_functions_that_save(directory, name: str) -> None:
    large = keras.Sequential([keras.Input((512,)), *[keras.layers.Dense(512) for _ in range(4)]])
    hvd.broadcast_variables(large.variables, 0)
    save = keras.saving.save_weights if "weights" in name else tf.keras.models.save_model
    save(large, directory / name)
    for _ in range(3):
        hvd.barrier()
        with (directory / name).open() as before:
            hvd.barrier()
            save(large, directory / name)
            hvd.barrier()
            assert os.fstat(before.fileno()).st_nlink == 0, "it was written in place"
        if name == "model.weights.h5":
            large.load_weights(directory / name)
        else:
            keras.models.load_model(directory / name)


def link(at: pathlib.Path, to: str) -> None:
    if RANK == 0:
        at.symlink_to(to)
    agree.gather_json("linked", None)


@pytest.mark.parametrize("kind", ["absolute", "relative", "dangling", "of links", "folder"])
@pytest.mark.parametrize("how", SAVE)
def test_links_remain(directory, how: str, kind: str) -> None:
    save, name = SAVE[how]
    there, given = directory / "disk" / name, directory / "home" / name
    if RANK == 0:
        there.parent.mkdir()
        if kind != "folder":
            given.parent.mkdir()
        if kind not in ("dangling", "folder"):
            there.write_text("before")
    agree.gather_json("made", None)
    if kind == "folder":
        link(given.parent, "disk")
    elif kind == "of links":
        link(directory / "middle", f"disk/{name}")
        link(given, "../middle")
    else:
        link(given, str(there) if kind == "absolute" else f"../disk/{name}")
    save(given)
    agree.gather_json("saved", None)
    links = [given.parent if kind == "folder" else given, directory / "middle"]
    assert all(path.is_symlink() for path in links if path != links[1] or kind == "of links")
    np.testing.assert_array_equal(loaded(given), model().get_weights()[0])
    assert not there.is_symlink()
    assert sorted(path.name for path in there.parent.iterdir()) == [name]
    assert kind == "folder" or [path.name for path in given.parent.iterdir()] == [name]


def test_export_goes_behind_a_link(directory, capsys) -> None:
    link(directory / "served", "disk")  # which does not exist yet
    model().export(directory / "served")
    assert f"Saved artifact at '{directory / 'served'}'" in capsys.readouterr().out
    agree.gather_json("exported", None)
    assert (directory / "served").is_symlink()
    assert (directory / "disk" / "saved_model.pb").is_file()


@pytest.mark.parametrize("how", SAVE)
def test_a_file_keeps_its_permissions_and_its_other_names(directory, how: str) -> None:
    save, name = SAVE[how]
    given, other = directory / name, directory / "other"
    if RANK == 0:
        given.write_text("before")
        given.chmod(0o640)
    agree.gather_json("made", None)
    save(given)
    agree.gather_json("saved", None)
    assert given.stat().st_mode & 0o777 == 0o640
    if RANK == 0:
        given.write_text("before")
        os.link(given, other)
        save(given) if how != "ModelCheckpoint" else model().save(given)
        assert given.samefile(other)
        np.testing.assert_array_equal(loaded(given), model().get_weights()[0])
    agree.gather_json("linked", None)


def test_relative_paths(directory, monkeypatch) -> None:
    monkeypatch.chdir(directory)
    for save, name in SAVE.values():
        save(name)
    agree.gather_json("saved", None)
    for _, name in SAVE.values():
        np.testing.assert_array_equal(loaded(directory / name), model().get_weights()[0])


def test_what_is_no_file_gets_the_bytes_themselves(directory) -> None:
    if RANK == 0:
        os.mkfifo(directory / "model.keras")
        got: list[bytes] = []
        reader = threading.Thread(
            target=lambda: got.append((directory / "model.keras").read_bytes())
        )
        reader.start()
        model().save(directory / "model.keras")
        reader.join()
        assert got[0].startswith(b"PK")
        assert (directory / "model.keras").is_fifo()
    agree.gather_json("tried", None)


def test_a_full_disk_leaves_what_was_there(directory) -> None:
    """Keras raises; the link to the device that is full remains."""
    link(directory / "model.keras", "/dev/full")
    with pytest.raises(OSError, match="No space left"):
        model().save(directory / "model.keras")
    agree.gather_json("tried", None)
    assert os.readlink(directory / "model.keras") == "/dev/full"
