"""Checkpoints and saved models of optimizers whose state is in shares."""

import zipfile
from typing import Any

import h5py
import keras
import pytest

import hvd_keras as hvd
from hvd_keras.gradients import shards
from tests.harness import training
from tests.parallel.saving.test_tables_in_files import STEPS, state_of, train

RANK, SIZE = hvd.rank(), hvd.size()
EVERYONE = hvd.global_process_set


def build(shard_state: bool, of: Any = EVERYONE, *, scaled: bool = False, **options: Any) -> Any:
    hidden = [keras.layers.Dense(units, activation="tanh") for units in (7, 4)]
    model = keras.Sequential([keras.Input((5,)), *hidden, keras.layers.Dense(1)])
    training.set_weights(model, seed=0)
    optimizer = keras.optimizers.Adam(0.05, **options)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    distributed = hvd.DistributedOptimizer(optimizer, process_set=of, shard_state=shard_state)
    # A few steps take less time than tracing.
    model.compile(optimizer=distributed, loss="mse", run_eagerly=True)
    return model


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_training_goes_on(directory, before: bool, after: bool) -> None:
    """With shares and without, in any order, as if nothing had happened."""

    def run(shard_state: bool, *callbacks: Any) -> Any:
        model = build(shard_state, gradient_accumulation_steps=2)

        def begin(epoch, logs):
            for slot in model.optimizer._momentums:
                slot.assign(slot * 0.5)

        train(model, *callbacks, keras.callbacks.LambdaCallback(on_epoch_begin=begin))
        return model

    undisturbed = run(False, None)
    with pytest.raises(KeyboardInterrupt):
        run(before, hvd.callbacks.Checkpoint(directory, save_freq=1), training.Crash(STEPS + 3))
    again = run(after, hvd.callbacks.Checkpoint(directory, save_freq=2))
    training.assert_same(state_of(again), state_of(undisturbed))
    shared = sum(shards.of(v) is not None for v in again.optimizer.variables)
    assert shared == (12 if after else 0)


@pytest.mark.ranks(2, 4)
def test_other_numbers_of_ranks(directory) -> None:
    """From all ranks to some, to one without shares, and back."""
    some, one = hvd.add_process_set(range(1, SIZE)), hvd.add_process_set([0])
    model = build(True)
    train(model, hvd.callbacks.Checkpoint(directory), epochs=1)
    state = state_of(model)
    for of, shard_state in ((some, True), (one, False)):
        if of.included():
            fewer = build(shard_state, of)
            train(fewer, hvd.callbacks.Checkpoint(directory, process_set=of), epochs=1, of=of)
            training.assert_same(state_of(fewer), state)
            if of is one:
                train(fewer, hvd.callbacks.Checkpoint(directory, process_set=of), epochs=2, of=of)
                state = state_of(fewer)
        hvd.barrier()
    state = hvd.broadcast_object(state, root_rank=0)
    model = build(True)
    train(model, hvd.callbacks.Checkpoint(directory), epochs=2)
    training.assert_same(state_of(model), state)


def test_a_saved_model_has_a_plain_optimizer_with_its_whole_state(directory) -> None:
    model = build(True, scaled=True, use_ema=True)
    train(model, None, epochs=1)
    state = state_of(model)
    path = directory / "model.keras"
    model.second = hvd.DistributedOptimizer(keras.optimizers.SGD(momentum=0.9), shard_state=True)
    model.second.build(model.trainable_variables)  # as one of a GAN's
    hvd.save_model(model, path)
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file:
        slots = h5py.File(file)["second/vars"]
        shapes = [slots[str(i)].shape for i in range(2, len(slots))]
    assert shapes == [tuple(v.shape) for v in model.trainable_variables]
    with pytest.raises(ValueError, match=r"has a part of adam\S*/\S+ only. Use hvd.save_model"):
        model.save(directory / f"{RANK}.keras")
    with pytest.raises((ValueError, RuntimeError), match=r"Use hvd.save_model"):
        train(model, None, hvd.callbacks.ModelCheckpoint(directory / "2.keras"), epochs=1)
    alone = keras.models.load_model(path)
    training.assert_same(state_of(alone), state)
    again = hvd.load_model(path, shard_state=True)
    training.assert_same(state_of(again), state)
    assert any(shards.of(v) for v in again.optimizer.variables)
    train(again, None, epochs=1)
    other = keras.Sequential.from_config(model.get_config())
    other.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.25), shard_state=True))
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'sgd"):
        other.load_weights(path)  # with the state of another optimizer
    training.assert_same(other.get_weights(), alone.get_weights())
    assert float(other.optimizer.learning_rate) == 0.25
    hvd.barrier()
    assert [p.name for p in directory.iterdir()] == [path.name]
