"""An interrupted and restarted training ends like an undisturbed one."""

import contextlib
import errno
import os
import random
import resource
import shutil
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from hvd_keras.saving import per_rank, storage
from tests.harness import training
from tests.harness.inputs import damage

RANK, SIZE = hvd.rank(), hvd.size()
EPOCHS, STEPS, BATCH = 3, 5, 4


@pytest.fixture
def directory(directory):
    """Returns a folder that does not exist yet; only rank 0 uses it."""
    return directory / "checkpoints"


class Anneals(keras.layers.Layer):
    """Counts its calls in variables that Keras does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)
        self.module = [[tf.Module()]]
        self.module[0][0].calls = tf.Variable(0.0, trainable=False)

    def call(self, x, training: bool = False):
        if training:
            self.calls.assign_add(0.1)
            self.module[0][0].calls.assign_add(0.1)
        return x / (1.0 + self.calls + self.module[0][0].calls)


def noisy_loss() -> Any:
    """A function whose state is outside of it."""
    calls = keras.Variable(0.0, trainable=False)
    generator = keras.random.SeedGenerator(7)

    def loss(labels, outputs):
        calls.assign_add(0.1)
        noise = keras.random.normal(tf.shape(outputs), seed=generator)
        return tf.reduce_mean((outputs + calls * noise - labels) ** 2, -1)

    return loss


def build(make_optimizer, run_eagerly: bool = True, **arguments) -> keras.Model:
    """Builds a model with all kinds of state. Weights and generators differ by rank.

    Eager by default, because a few steps take less time than tracing.
    """
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization()]
    layers += [Anneals(), keras.layers.Dropout(0.4, seed=RANK + 1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    training.set_weights(model, seed=RANK)
    arguments = {"loss": noisy_loss(), "run_eagerly": run_eagerly, **arguments}
    training.compiled(model, make_optimizer(), **arguments)
    return model


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    shape = SIZE * STEPS * BATCH
    return (
        generator.normal(size=(shape, 5)).astype("float32"),
        generator.normal(size=(shape, 1)).astype("float32"),
    )


def train(
    model: keras.Model,
    saved: hvd.callbacks.Checkpoint | None,
    *more: keras.callbacks.Callback,
    last: bool = True,
    epochs: int = EPOCHS,
) -> None:
    data = hvd.data.shard(rows(), batch_size=BATCH, seed=5)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.05 * SIZE, warmup_epochs=2),
    ]
    if saved:
        callbacks = [*callbacks, saved] if last else [saved, *callbacks]
    options = {"verbose": 0, "shuffle": False, "validation_data": data.take(1)}
    model.fit(data, epochs=epochs, callbacks=[*callbacks, *more], **options)


def assert_same_state(model: keras.Model, other: keras.Model) -> None:
    mine, theirs = ([*m.variables, *m.optimizer.variables] for m in (model, other))
    training.assert_same(mine, theirs)


def interrupt(model: keras.Model, saved: Any, after: int, *more: Any, **options) -> None:
    """Crashes after a batch that is counted over all epochs from 0."""
    with pytest.raises(KeyboardInterrupt):
        train(model, saved, *more, training.Crash(after + 1), **options)


@pytest.mark.cases(1)
@pytest.mark.parametrize("after", [2, STEPS + 3, 2 * STEPS, 2 * STEPS + 4, 4 * STEPS])
@pytest.mark.parametrize("numbers", [((0, 2), (2, 4)), ((0, 2), (0, 2))], ids=["on", "again"])
def test_one_checkpoint_in_two_fits(directory, numbers, after: int) -> None:
    """Interrupts in the first fit, at its end, in the second one, and at the end."""

    def train_twice(model: keras.Model, saved: Any, *more: Any) -> None:
        source = hvd.data.shard(rows(), batch_size=BATCH)
        calls = model.layers[2].calls
        for start, epochs in numbers:
            reset = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: calls.assign(0.0))
            callbacks = [reset, *([saved] if saved else []), *more]
            shuffled = source.map(lambda x, y: (x, y))
            training.fit(model, *callbacks, data=shuffled, initial_epoch=start, epochs=epochs)
        raise KeyboardInterrupt

    undisturbed, again = build(momentum), build(momentum)
    with pytest.raises(KeyboardInterrupt):
        train_twice(undisturbed, None)
    saved = hvd.callbacks.Checkpoint(directory, save_freq=2)
    with pytest.raises(KeyboardInterrupt):
        train_twice(build(momentum), saved, training.Crash(after + 1))
    with pytest.raises(KeyboardInterrupt):
        train_twice(again, hvd.callbacks.Checkpoint(directory, save_freq=2))
    assert_same_state(again, undisturbed)


def test_a_fit_that_broke_off_and_was_called_again_counts_once(directory) -> None:
    """As in a notebook, in one process."""
    model, saved = build(adam), hvd.callbacks.Checkpoint(directory)
    interrupt(model, saved, 2)
    interrupt(model, saved, STEPS + 1)
    batches: list[int] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(b))
    train(build(adam), hvd.callbacks.Checkpoint(directory), record)
    assert len(batches) == (EPOCHS - 1) * STEPS


def test_a_restart_says_where_it_continues(directory, capfd, recwarn) -> None:
    saved = hvd.callbacks.Checkpoint(directory, save_freq=2)
    interrupt(build(adam), saved, STEPS + 4)
    assert "hvd_keras:" not in capfd.readouterr().err
    train(build(adam), hvd.callbacks.Checkpoint(directory))
    place = f"continuing from checkpoint-00001-0000004, epoch 2 of {EPOCHS}, batch 5\n"
    assert (f"hvd_keras: {place}" in capfd.readouterr().err) == (RANK == 0)
    # Validation of a model that runs eagerly has variables of hvd_keras's own.
    assert not [one for one in recwarn if "does not restore" in str(one.message)]
    train(build(adam), hvd.callbacks.Checkpoint(directory))
    place = (
        f"checkpoint-0000{EPOCHS}-0000000 is the end of epoch {EPOCHS}, and fit ends after epoch"
    )
    assert (f"hvd_keras: {place} {EPOCHS}" in capfd.readouterr().err) == (RANK == 0)
    # As if rank 0 were on another host now, which has a disk of its own.
    disk = directory if RANK else directory / "another"
    text = "rank 1 on .* has {} in .* rank 0, .* has {}"
    found = text.format(f"checkpoint-0000{EPOCHS}-0000000.h5", "none")
    with pytest.raises(RuntimeError, match=found):
        train(build(adam), hvd.callbacks.Checkpoint(disk))
    disk.mkdir(exist_ok=True)
    storage.path_of(disk, 100_000 if RANK else 99_999, 0).touch()
    found = text.format("checkpoint-100000-0000000.h5", "checkpoint-99999-0000000.h5")
    with pytest.raises(RuntimeError, match=found):
        train(build(adam), hvd.callbacks.Checkpoint(disk))


@pytest.mark.slow
def test_a_restart_that_steps_per_execution_does_not_divide(directory) -> None:
    undivided = build(adam, steps_per_execution=3, run_eagerly=False)
    interrupt(build(adam), hvd.callbacks.Checkpoint(directory, save_freq=4, restore=False), 4)
    with pytest.raises(ValueError, match="after 4 batches, which steps_per_execution=3 does not"):
        train(undivided, hvd.callbacks.Checkpoint(directory))


def test_finished_training_is_not_repeated(directory) -> None:
    first = build(adam)
    train(first, hvd.callbacks.Checkpoint(directory))
    again = build(adam)
    batches: list[int] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(b))
    train(again, hvd.callbacks.Checkpoint(directory), record)
    assert batches == []
    assert_same_state(again, first)
    # Trains more epochs from there; a later fit does not start at that epoch.
    train(again, hvd.callbacks.Checkpoint(directory), record, epochs=EPOCHS + 1)
    assert len(batches) == STEPS
    train(again, None, record, epochs=1)
    assert len(batches) == 2 * STEPS


def test_random_generators_of_python_and_numpy_go_on(directory) -> None:
    random.seed(RANK)
    np.random.seed(RANK)
    train(build(adam), hvd.callbacks.Checkpoint(directory), epochs=1)
    expected = random.random(), np.random.random()
    train(build(adam), hvd.callbacks.Checkpoint(directory), epochs=1)
    assert (random.random(), np.random.random()) == expected


def test_fits_that_were_complete_leave_what_follows_them_as_it_was(directory, monkeypatch) -> None:
    """Generators, by which a script makes the next data, and the epoch at which they begin."""

    def run(folder: str, *more: Any) -> tuple[list[float], int, keras.Model]:
        monkeypatch.chdir(directory.parent)
        model, sums = build(adam), []
        saved = hvd.callbacks.Checkpoint(folder)
        monkeypatch.chdir("/")  # the folder is that of before
        np.random.seed(1)
        for _ in range(3):
            start, (x, y) = saved.initial_epoch, rows()
            x += np.random.normal(size=x.shape)
            sums.append(float(x.sum()))
            used = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *more, saved]
            data = hvd.data.shard((x, y), batch_size=BATCH)
            with contextlib.suppress(KeyboardInterrupt):
                model.fit(data, epochs=np.int64(2), verbose=0, callbacks=used)
            if more and len(sums) == 2:
                break
        return sums, start, model

    *expected, undisturbed = run("undisturbed")
    run("checkpoints", training.Crash(3 * STEPS + 2))
    *found, again = run("checkpoints")
    assert found == expected
    assert_same_state(again, undisturbed)


def test_the_generator_of_keras_random_goes_on(directory, warned) -> None:
    level = tf.Variable(RANK + 1.0, trainable=False, name="level")

    class Noise(keras.layers.Layer):
        def call(self, x, training=False):
            return x + level * keras.random.normal(keras.ops.shape(x)) if training else x

    def trained(epochs: int, *callbacks) -> keras.Model:
        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((5,)), Noise(), keras.layers.Dense(1)])
        net.compile(optimizer=hvd.DistributedOptimizer(adam()), loss="mse")
        train(net, *callbacks, epochs=epochs)
        return net

    draw = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: keras.random.uniform(()))
    undisturbed = trained(2, None, draw)
    crash = training.Crash(STEPS + 4)
    with pytest.raises(KeyboardInterrupt):
        trained(2, hvd.callbacks.Checkpoint(directory, save_freq=2), draw, crash)
    assert_same_state(trained(2, hvd.callbacks.Checkpoint(directory), draw), undisturbed)
    told = {text for text in warned if "does not save level:0, which the training step" in text}
    assert len(told) == (RANK == 0)


def test_attributes_that_ranks_do_not_have_alike_are_left_out(directory, warned) -> None:
    def make() -> keras.Model:
        net = build(adam)
        net.layers[0].words = tf.Variable(["a", "b"])
        net.layers[0].rows = tf.Variable(tf.zeros([RANK + 1]), shape=[None])
        if RANK == 0:
            net.layers[0].alone = tf.Variable(0.0)
        return net

    for _ in range(2):
        train(make(), hvd.callbacks.Checkpoint(directory), epochs=1)
    told = {text for text in warned if "Checkpoint does not save" in text}
    assert len(told) == (RANK == 0)


def test_variables_that_numpy_does_not_know_and_local_ones(directory) -> None:
    """bfloat16 weights, and a layer whose weights differ by rank."""

    def make() -> keras.Model:
        net = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(3, dtype="bfloat16"), keras.layers.Dense(1)]
        )
        training.set_weights(net, seed=RANK)
        local = hvd.PartialDistributedOptimizer(adam(), local_layers=net.layers[1])
        net.compile(optimizer=local, loss="mse")
        return net

    def fit(net: keras.Model) -> None:
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        data = hvd.data.shard(rows(), batch_size=BATCH)
        net.fit(data, verbose=0, callbacks=[hvd.callbacks.Checkpoint(directory), broadcast])

    first, again = make(), make()
    fit(first)
    fit(again)  # has nothing left to train, and nothing to broadcast
    assert_same_state(again, first)
    kernels = agree.gather_json("kernels", first.layers[1].kernel.numpy().tolist())
    assert all(kernel != kernels[0] for kernel in kernels[1:])


def test_local_layers_of_different_shapes_are_refused(directory) -> None:
    net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2 + RANK), keras.layers.Dense(1)])
    net.compile(hvd.PartialDistributedOptimizer(adam(), local_layers=net.layers), loss="mse")
    checkpoint = hvd.callbacks.Checkpoint(directory)
    with pytest.raises(
        ValueError, match=r"local layers' shapes differ: rank 0.*\[5, 2\].*\[5, 3\]"
    ):
        net.fit(hvd.data.shard(rows(), batch_size=BATCH), verbose=0, callbacks=[checkpoint])


def test_slots_that_a_gpu_has_rounded_are_those_of_rank_0(directory, monkeypatch) -> None:
    """As if rank 1 had a GPU."""

    class Round(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for slot in self.model.optimizer.momentums:
                slot.assign(slot * (1 + 2e-6 * RANK))

    monkeypatch.setattr(per_rank, "has_gpu", lambda: RANK == 1)
    train(build(momentum), hvd.callbacks.Checkpoint(directory), Round(), epochs=1)
    if RANK == 0:
        stored = storage.read(storage.files(directory)[0]).variables
        own = [variable.path for variable in stored if variable.by_rank]
        assert own
        assert all(path.endswith("seed_generator_state") for path in own)


DAMAGE = {
    "its content does not match its SHA-256": lambda newest, older: damage(newest),
    "it was written as checkpoint-00001": lambda newest, older: shutil.copyfile(older, newest),
}


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(directory, text: str) -> None:
    undisturbed = build(adam)
    train(undisturbed, None)
    interrupt(build(adam), hvd.callbacks.Checkpoint(directory), 2 * STEPS)
    if RANK == 0:
        newest, older = storage.files(directory)
        assert (newest.name, older.name) == (
            "checkpoint-00002-0000000.h5",
            "checkpoint-00001-0000000.h5",
        )
        DAMAGE[text](newest, older)
        (directory / ".checkpoint-00003-0000000.h5.killed").mkdir()
    again = build(adam)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(again, hvd.callbacks.Checkpoint(directory))
    told = [str(w.message) for w in caught if "damaged" in str(w.message)]
    assert len(told) == (RANK == 0)
    if RANK == 0:
        assert f"checkpoint-00002-0000000.h5: {text}" in told[0]
        assert "Restoring" in told[0]
        assert len(list(directory.iterdir())) == 2
    assert_same_state(again, undisturbed)


def test_only_damaged_checkpoints_are_an_error(directory) -> None:
    train(build(adam), hvd.callbacks.Checkpoint(directory, keep=3))
    if RANK == 0:
        for path in storage.files(directory):
            damage(path)
    with pytest.raises(RuntimeError, match=r"(?s)all .* damaged: .*00003.*00002.*00001.*restore="):
        train(build(adam), hvd.callbacks.Checkpoint(directory))
    scratch, expected = build(adam), build(adam)
    train(expected, None, epochs=1)
    train(scratch, hvd.callbacks.Checkpoint(directory, restore=False), epochs=1)
    assert_same_state(scratch, expected)
    if RANK == 0:
        assert [p.name for p in storage.files(directory)] == ["checkpoint-00001-0000000.h5"]


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(directory) -> None:
    train(build(adam), hvd.callbacks.Checkpoint(directory), epochs=1)
    with pytest.raises(ValueError, match=r"adam.*momentum.*in the checkpoint.*in the model"):
        train(build(momentum), hvd.callbacks.Checkpoint(directory))
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(9), keras.layers.Dense(1)])
    other.compile(optimizer=hvd.DistributedOptimizer(adam()), loss="mse")
    before = hvd.broadcast(training.flat(other), 0).numpy()  # by the callback before
    with pytest.raises(ValueError, match=r"kernel float32\[5, 8\] in.*kernel float32\[5, 9\] in"):
        train(other, hvd.callbacks.Checkpoint(directory), last=False)
    np.testing.assert_array_equal(training.flat(other), before)


def test_a_model_that_does_not_fit_on_one_rank_is_refused_on_all(directory) -> None:
    train(build(adam), hvd.callbacks.Checkpoint(directory), epochs=1)
    model = build(momentum if RANK == SIZE - 1 else adam)
    with pytest.raises(ValueError, match=f"Adam, rank {SIZE - 1} has SGD"):
        train(model, hvd.callbacks.Checkpoint(directory), last=False)


def test_arguments_that_differ_are_refused(directory) -> None:
    saved = hvd.callbacks.Checkpoint(directory, save_freq=RANK + 1)
    with pytest.raises(ValueError, match=r"differ: rank 0: .*save_freq=1.*rank 1: .*save_freq=2"):
        train(build(adam), saved)


def test_impossible_arguments(directory) -> None:
    with pytest.raises(ValueError, match="keep is 0, expected a positive integer"):
        hvd.callbacks.Checkpoint(directory, keep=0)
    with pytest.raises(ValueError, match="save_freq is 'batch', expected 'epoch' or a positive"):
        hvd.callbacks.Checkpoint(directory, save_freq="batch")


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks(directory) -> None:
    if RANK == 0:
        directory.write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write: rank 0: .*checkpoints"):
        train(build(adam), hvd.callbacks.Checkpoint(directory / "deep"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("part", [0.1, 0.6, 0.95, 0.99])
def test_a_full_disk_can_be_caught_on_all_ranks(directory, part: float) -> None:
    """Wherever the file ends, in a value or in what HDF5 writes when it closes the file."""
    saved = hvd.callbacks.Checkpoint(directory)
    model = build(adam)
    train(model, saved, epochs=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    descriptors = len(os.listdir("/proc/self/fd"))
    if RANK == 0:
        room = int(storage.files(directory)[0].stat().st_size * part)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        saved._save(1, 0)
        with pytest.raises(OSError, match=r"cannot write: rank 0: \[Errno 27\]") as caught:
            saved._writing.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "the space is not given back"
    if RANK == 0:
        assert [path.name for path in directory.iterdir()] == ["checkpoint-00001-0000000.h5"]
    again = build(adam)
    train(again, hvd.callbacks.Checkpoint(directory), epochs=1)
    assert_same_state(again, model)


def test_data_that_ends_before_the_saved_batch(directory) -> None:
    interrupt(build(adam), hvd.callbacks.Checkpoint(directory, save_freq=4), 4)
    model = build(adam)
    less = tf.data.Dataset.from_tensor_slices(rows()).shard(SIZE, RANK).batch(2 * BATCH)
    with pytest.raises(ValueError, match="3 batches of epoch 0, but the model had seen 4"):
        model.fit(less, verbose=0, callbacks=[hvd.callbacks.Checkpoint(directory)])
    history = model.fit(less, verbose=0).history
    assert history["loss"][0] > 0, "does not train any more"
