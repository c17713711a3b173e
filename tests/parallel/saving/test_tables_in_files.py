"""Checkpoints and saved models of tables of which each rank has a part."""

import contextlib
import pickle
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import shards
from hvd_keras.saving import storage
from tests.harness.inputs import damage
from tests.harness.training import Crash, assert_same

RANK, SIZE = hvd.rank(), hvd.size()
ROWS, COLUMNS, BATCH, STEPS = 23, 6, 4, 3
EVERYONE = hvd.global_process_set


def build(process_set: Any = EVERYONE, shard: Any = "columns") -> Any:
    """A model of two tables, one always divided by rows, whose weights differ in each call."""
    tables = {
        "one": hvd.layers.Embedding(ROWS, COLUMNS, shard=shard, process_set=process_set),
        "two": hvd.layers.Embedding(ROWS, 2, shard="rows", process_set=process_set),
    }
    ids = keras.Input((3,), dtype="int32")
    rows = hvd.layers.Embeddings(tables)({"one": ids, "two": ids})
    both = keras.layers.Flatten()(keras.layers.Concatenate()([rows["one"], rows["two"]]))
    model = keras.Model(ids, keras.layers.Dense(1)(both))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), process_set=process_set)
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
    return model


def train(model: Any, saved: Any, *more: Any, epochs: int = 2, of: Any = EVERYONE) -> None:
    random = np.random.default_rng(3)
    count = of.size() * BATCH * STEPS
    is_table = model.inputs[0].dtype == "int32"
    x = random.integers(0, ROWS, (count, 3)) if is_table else random.normal(size=(count, 5))
    rows = x, random.normal(size=(count, 1))
    data = hvd.data.shard(rows, batch_size=BATCH, shuffle=False, process_set=of)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(of.ranks[0])]
    callbacks += [saved] if saved else []
    model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[*callbacks, *more])


def back_to_the_first() -> list[Any]:
    """Puts the weights that the first epoch has left back at the end."""
    number = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(n=epoch))
    stop = keras.callbacks.EarlyStopping
    return [number, stop("n", mode="min", patience=9, restore_best_weights=True)]


def state_of(model: Any) -> list[np.ndarray]:
    """All variables, of tables the whole."""
    return [
        shards.whole(v) if shards.of(v) else np.asarray(v)
        for v in (*model.variables, *model.optimizer.variables)
    ]


@pytest.mark.parametrize("restores_best", [False, True])
def test_an_interrupted_training_goes_on(directory, restores_best: bool) -> None:
    more = back_to_the_first if restores_best else list
    keras.utils.set_random_seed(1)
    undisturbed = build()
    train(undisturbed, None, *more())
    keras.utils.set_random_seed(1)
    first = build()
    saved = hvd.callbacks.Checkpoint(directory, save_freq=2)
    with pytest.raises(KeyboardInterrupt):
        train(first, saved, *more(), Crash(STEPS + 2))
    again = build()
    train(again, hvd.callbacks.Checkpoint(directory, save_freq=2), *more())
    assert_same(state_of(again), state_of(undisturbed))
    if RANK == 0:
        names = sorted(path.name for path in directory.iterdir())
        assert len(names) == 2 * (1 + SIZE), "each has a file of each rank, and no others are left"


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["an older one", "another rank's"])
def test_another_part_under_the_name_of_the_newest_is_not_used(directory, whose: str) -> None:
    keras.utils.set_random_seed(1)
    undisturbed = build()
    train(undisturbed, None, epochs=3)
    keras.utils.set_random_seed(1)
    train(build(), hvd.callbacks.Checkpoint(directory), epochs=2)
    if RANK == 0:
        newest, older = (
            sorted(directory.glob(f"{path.stem}.*.h5")) for path in storage.files(directory)
        )
        other = older[0] if whose == "an older one" else newest[1]
        newest[0].write_bytes(other.read_bytes())
    again = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(again, hvd.callbacks.Checkpoint(directory), epochs=3)
    if RANK == 0:
        assert any("it was written as checkpoint-0000" in str(w.message) for w in caught)
    assert_same(state_of(again), state_of(undisturbed))


@pytest.mark.ranks(2, 4)
def test_other_numbers_of_ranks(directory) -> None:
    """From all ranks to some, and back."""
    some = hvd.add_process_set(list(range(1, SIZE)))
    model = build()
    train(model, hvd.callbacks.Checkpoint(directory), *back_to_the_first(), epochs=1)
    state = state_of(model)
    there: list[Any] = []
    if some.included():
        fewer = build(some)
        train(fewer, hvd.callbacks.Checkpoint(directory, process_set=some), epochs=1, of=some)
        assert_same(state_of(fewer), state)
        saved = hvd.callbacks.Checkpoint(directory, process_set=some)
        train(fewer, saved, *back_to_the_first(), epochs=2, of=some)
        there = state_of(fewer)
        count = len(fewer.weights)
        assert_same(there[:count], state[:count])
        assert any((a != b).any() for a, b in zip(there, state, strict=True)), "it has trained"
    there = hvd.broadcast_object(there, root_rank=1)
    model = build()
    train(model, hvd.callbacks.Checkpoint(directory), *back_to_the_first(), epochs=2)
    assert_same(state_of(model), there)


@pytest.mark.ranks(2, 3)
def test_an_accumulation_goes_on_with_other_numbers_of_ranks(directory) -> None:
    """A step has 12 rows on any number of ranks; eight steps make two updates."""
    random = np.random.default_rng(3)
    rows = random.integers(0, ROWS, (96, 3)), random.normal(size=(96, 1))
    fewer = hvd.add_process_set(list(range(SIZE - 1)))

    def table(name: str, of: Any, *more: Any, shard: Any = "rows") -> Any:
        if not of.included():
            return None
        options = {"combiner": "sum", "shard": shard, "process_set": of}
        one = hvd.layers.Embedding(ROWS, 1, embeddings_initializer="zeros", **options)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), one])
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        model.compile(hvd.DistributedOptimizer(sgd, process_set=of), "mse")
        data = hvd.data.shard(rows, batch_size=12 // of.size(), shuffle=False, process_set=of)
        saved = hvd.callbacks.Checkpoint(directory / name, save_freq=1, process_set=of)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(data, verbose=0, callbacks=[saved, *more])
        return one.get_table()

    expected = table("undisturbed", EVERYONE)
    table("to fewer", EVERYONE, Crash(3))
    found = table("to fewer", fewer)
    table("to more", fewer, Crash(3))
    table("to whole", EVERYONE, Crash(3))
    results = [table("to more", EVERYONE), table("to whole", EVERYONE, shard=None)]
    for result in [*results, *([found] if fewer.included() else [])]:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_a_damaged_part_is_told_and_the_checkpoint_before_is_used(directory) -> None:
    model = build()
    train(model, hvd.callbacks.Checkpoint(directory), epochs=1)
    state = state_of(model)
    train(model, hvd.callbacks.Checkpoint(directory, restore=True), epochs=2)
    if RANK == 0:
        newest = storage.files(directory)[0]
        damage(sorted(directory.glob(f"{newest.stem}.*-*.h5"))[-1], -1)
        (directory / "checkpoint-00009-0000000.01234567-0000.h5").touch()  # its job was killed
    again = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(again, hvd.callbacks.Checkpoint(directory), epochs=1)
    assert_same(state_of(again), state)
    told = [str(w.message) for w in caught if "damaged" in str(w.message)]
    assert len(told) == (RANK == 0)
    assert all("its content does not match its SHA-256" in text for text in told)
    if RANK == 0:
        assert not list(directory.glob("checkpoint-00009*"))


def test_a_table_in_parts_becomes_a_whole_one_and_back(directory) -> None:
    model = build()
    train(model, hvd.callbacks.Checkpoint(directory), epochs=1)
    state = state_of(model)
    whole = build(shard=None)
    train(whole, hvd.callbacks.Checkpoint(directory), epochs=1)
    assert_same(state_of(whole), state)
    train(whole, hvd.callbacks.Checkpoint(directory), epochs=2)
    state = state_of(whole)
    again = build()
    train(again, hvd.callbacks.Checkpoint(directory), epochs=2)
    assert_same(state_of(again), state)


def test_a_part_that_cannot_be_written_is_an_error_on_all_ranks(directory) -> None:
    class InTheWay(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                directory.rmdir()
                directory.write_text("in the way")

    mine = [InTheWay()] if RANK == 0 else []
    with pytest.raises(OSError, match=r"cannot write a rank's part: "):
        train(build(), hvd.callbacks.Checkpoint(directory), *mine)
    if RANK == 0:
        directory.unlink()
        directory.mkdir()


def save_and_compare(path: Any, model: Any, *, plain: bool) -> None:
    """Saves, and loads in one process and on all ranks."""
    ids = np.arange(12).reshape(4, 3)
    expected = model(ids).numpy()
    hvd.save_model(model, path)
    again = hvd.load_model(path)
    assert_same([np.asarray(v) for v in again.variables], [np.asarray(v) for v in model.variables])
    np.testing.assert_allclose(again(ids), expected, rtol=1e-6)
    assert any(shards.of(v) for v in again.variables), "the tables are divided again"
    if RANK == 0 and plain:
        alone = keras.models.load_model(path)
        kinds = {type(layer) for layer in alone.layers}
        assert keras.layers.Embedding in kinds
        assert not any(kind.__module__.startswith("hvd_keras") for kind in kinds)
        np.testing.assert_allclose(alone(ids), expected, rtol=1e-6)
        assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("shard", ["rows", "columns"])
def test_a_saved_model_is_plain_keras(directory, shard) -> None:
    words = keras.layers.StringLookup(vocabulary=["a", "b"])  # has a file of its own
    table = hvd.layers.Embedding(400_003, 4, shard=shard, mask_zero=True)  # in several blocks
    layers = [table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    hvd.broadcast_variables(model.variables, 0)
    save_and_compare(directory / "new" / "model.keras", model, plain=True)
    assert words(["b"]).numpy() == [2]


def test_a_saved_model_with_layers_of_hvd_keras(directory, warned) -> None:
    model = build()
    hvd.broadcast_variables(model.variables, 0)
    save_and_compare(directory / "model.keras", model, plain=False)
    assert not warned
    hvd.load_model(directory / "model.keras", shard_state=True)
    assert len(warned) == (RANK == 0)
    assert all("no optimizer. Give arguments about an optimizer to" in text for text in warned)


def test_a_plain_layer_of_the_same_name_in_another_model_stays_plain(directory) -> None:
    """Names are unique in one model only."""
    ids = keras.Input((3,), dtype="int32")
    layers = [
        hvd.layers.Embedding(ROWS, COLUMNS, shard="rows", name="words"),
        keras.layers.Embedding(ROWS, COLUMNS, name="words"),
    ]
    towers = [keras.Sequential([keras.Input((3,), dtype="int32"), layer]) for layer in layers]
    model = keras.Model(ids, keras.layers.Add()([tower(ids) for tower in towers]))
    hvd.broadcast_variables(model.variables, 0)
    hvd.save_model(model, directory / "model.keras")
    again = hvd.load_model(directory / "model.keras")
    assert [shards.of(v) is not None for v in again.variables] == [True, False]
    batch = np.arange(6).reshape(2, 3)
    np.testing.assert_allclose(again(batch), model(batch), rtol=1e-6)
    if RANK == 0:
        alone = keras.models.load_model(directory / "model.keras")
        np.testing.assert_allclose(alone.variables[1], model.variables[1], rtol=1e-6)


def test_what_cannot_be_saved(directory) -> None:
    model = build()
    tracked = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(tracked, str(directory), max_to_keep=1)
    ways = [
        *((model.save, "m.keras"), (model.save, "m.h5"), (model.save_weights, "m.weights.h5")),
        *((model.export, "m"), (lambda path: tf.saved_model.save(model, path), "m")),
        *(
            (tracked.write, "m"),
            (lambda _: manager.save(), "m"),
            (lambda path: pickle.dumps(model), "m"),
        ),
    ]
    for save, name in ways if RANK == 0 else ():  # alone: it waits for no other rank
        with pytest.raises(ValueError, match=r"a part of .*/embeddings only. Use hvd.save_model"):
            save(str(directory / name))
        assert not list(directory.iterdir())
    with pytest.raises(ValueError, match=r"expected a name that ends in \.keras"):
        hvd.save_model(model, directory / "model.h5")
    if RANK == 0:
        (directory / "file").touch()
    with pytest.raises(OSError, match=r"cannot write .*model.keras: rank 0: "):
        hvd.save_model(model, directory / "file" / "model.keras")
    assert model(np.zeros((1, 3))).shape == (1, 1), "works afterwards"


def test_a_share_of_an_optimizers_state_is_in_no_file(directory) -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True)
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    tracked = tf.train.Checkpoint(optimizer=optimizer)
    for save, name in (model.save, "m.h5"), (tracked.write, "m"):
        with pytest.raises(
            ValueError, match=r"a part of adam.*/.*_momentum only. Use hvd.save_model"
        ):
            save(directory / str(RANK) / name)
    model.save(directory / str(RANK) / "m.h5", include_optimizer=False)
    model.export(directory / str(RANK) / "m", verbose=False)
    other = tf.train.Checkpoint(other=tf.compat.v1.train.AdamOptimizer())
    other.write(str(directory / str(RANK) / "other"))


class Subclassed(keras.Model):
    """Keras builds its layers in a graph, without values."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        init = keras.initializers.RandomUniform(seed=1)
        self.table = hvd.layers.Embedding(ROWS, COLUMNS, init, shard="rows")
        self.dense = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.dense(self.table(ids))


def test_a_subclassed_model_has_its_table_once_and_in_its_file(directory) -> None:
    ids = np.arange(12).reshape(4, 3) + RANK
    model = Subclassed()
    model(ids)
    assert [shards.of(v) is not None for v in model.table.weights] == [True]
    model.table.set_table(np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS))
    hvd.broadcast_variables(model.dense.variables, 0)
    hvd.save_model(model, directory / "model.keras")
    hvd.barrier()
    loaded = keras.models.load_model(
        directory / "model.keras", custom_objects={"Subclassed": Subclassed}
    )
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))
