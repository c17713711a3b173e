"""A flipped bit is found, and the rank that has it is named."""

import os

import keras
import numpy as np
import pytest

import hvd_keras as hvd
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
HOST = os.uname().nodename
pytestmark = pytest.mark.ranks(2, 3)
ROWS, BATCH, EPOCHS = 60, 2, 3
STEPS = ROWS // BATCH // SIZE


class Counter(keras.layers.Layer):
    """Counts its calls."""

    def build(self, shape) -> None:
        self.calls = self.add_weight((2,), "zeros", "int64", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add([1, 1])
        return x


def build() -> keras.Model:
    keras.utils.set_random_seed(RANK)
    layers = [
        keras.layers.Dense(7, name="float32"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(5, dtype="bfloat16", name="bfloat16"),
        Counter(name="int64"),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    # A few steps take less time than tracing.
    training.compiled(model, run_eagerly=True)
    return model


def weight(model: keras.Model, name: str):
    return model.get_layer(name).variables[0]


class Flip(keras.callbacks.Callback):
    """After a batch of the second epoch, on the last rank."""

    def __init__(self, name: str, bit: int, batch: int) -> None:
        super().__init__()
        self.name, self.bit, self.batch, self.epoch = name, bit, batch, 0

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None) -> None:
        if (self.epoch, batch + 1) == (1, self.batch) and RANK == SIZE - 1:
            variable = weight(self.model, self.name)
            training.flip(variable, self.bit - 8 * np.array(variable).itemsize)  # of the last one


def train(model: keras.Model, *callbacks) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 6)).astype("float32"), random.normal(size=(ROWS, 1))
    data = hvd.data.shard((x, y.astype("float32")), batch_size=BATCH)
    training.fit(model, *callbacks, data=data, epochs=EPOCHS)


def named(rank: int) -> str:
    """The rank that differs, if a majority tells."""
    return f"rank {rank} on {HOST}" if SIZE > 2 else ""


FLIPS = [("float32", 0, 5), ("float32", 30, 6), ("bfloat16", 15, 4), ("int64", 0, 4)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "bit", "batch"), FLIPS)
def test_a_flip_is_found_at_the_next_comparison(name: str, bit: int, batch: int) -> None:
    model = build()
    with pytest.raises(RuntimeError) as error:
        train(model, Flip(name, bit, batch), hvd.callbacks.VerifyWeights(3))
    text = f"after batch 6 of epoch 2 the values of {weight(model, name).path} differ, on "
    assert text + (named(SIZE - 1) or "ranks without a majority") in str(error.value)
    assert "equal after batch 3 of epoch 2" in str(error.value)


def test_a_restart_goes_on_from_verified_weights(directory) -> None:
    undisturbed, disturbed, again = build(), build(), build()
    train(undisturbed, hvd.callbacks.VerifyWeights(1))  # and there is no false alarm

    def callbacks() -> list:
        return [hvd.callbacks.VerifyWeights(2), hvd.callbacks.Checkpoint(directory, save_freq=2)]

    with pytest.raises(RuntimeError, match="after batch 4 of epoch 2"):
        train(disturbed, Flip("float32", 20, 3), *callbacks())
    train(again, *callbacks())
    for one, other in zip(again.trainable_variables, undisturbed.trainable_variables, strict=True):
        assert np.array(one).tobytes() == np.array(other).tobytes()


def test_gradients_that_a_rank_has_accumulated_are_its_own() -> None:
    """Also those of a scalar, in each batch; at the end of an epoch all ranks have their mean."""

    class Scale(keras.layers.Layer):
        def build(self, shape) -> None:
            self.scale = self.add_weight((), "ones", name="scale")

        def call(self, x):
            return x * self.scale

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), Scale()])
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=STEPS * EPOCHS - 1)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    train(model, hvd.callbacks.VerifyWeights(1))
    (sums,) = (v for v in optimizer.variables if "scale_gradient_accumulator" in v.path)
    assert float(sums) != 0
    assert len(set(hvd.allgather_object(float(sums)))) == 1


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="every is 0, expected a positive integer"):
        hvd.callbacks.VerifyWeights(0)
    with pytest.raises(ValueError, match="every differs by rank: rank 0: 5; rank 1: 6"):
        train(build(), hvd.callbacks.VerifyWeights(5 + RANK))
