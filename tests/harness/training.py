"""One model, trained by all ranks and by one process with the whole batch."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

BATCH = 4  # per rank
STEPS = 6
WORDS = 30


def dense_model() -> keras.Model:
    hidden = keras.layers.Dense(7, activation="tanh")
    return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(1)])


def sparse_model() -> keras.Model:
    layers = [keras.layers.Embedding(WORDS, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def data(model: keras.Model, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For ``size`` ranks: step s takes rows [s * size * BATCH, (s + 1) * size * BATCH)."""
    random = np.random.default_rng(7)
    rows = size * BATCH * STEPS
    if model.inputs[0].dtype == "int32":
        x = random.integers(0, WORDS, (rows, 3)).astype("int32")
    else:
        x = random.normal(size=(rows, 5)).astype("float32")
    return x, random.normal(size=(rows, 1)).astype("float32")


def shard(array: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Returns rank r's rows of each step; together the ranks see the rows of one process."""
    return array.reshape(STEPS, size, BATCH, *array.shape[1:])[:, rank].reshape(
        -1, *array.shape[1:]
    )


def mine(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    """This rank's rows of ``data``."""
    x, y = data(model, hvd.size())
    return shard(x, hvd.rank(), hvd.size()), shard(y, hvd.rank(), hvd.size())


def compiled(model: keras.Model | None = None, optimizer: Any = None, **options: Any) -> Any:
    """Compiles a model, by default ``dense_model``, for all ranks."""
    model = model or dense_model()
    optimizer = hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.01))
    model.compile(optimizer, **{"loss": "mse", **options})
    return model


def fit(model: keras.Model, *callbacks: Any, data: Any = None, broadcast=True, **options: Any):
    """Fits ``data``, by default this rank's rows, in their order; returns the logs."""
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if broadcast else []
    options = {"verbose": 0, "shuffle": False, **options, "callbacks": [*first, *callbacks]}
    if isinstance(data, tf.data.Dataset):
        return model.fit(data, **options).history
    return model.fit(*(data or mine(model)), **{"batch_size": BATCH, **options}).history


class Stepping:
    """A typical ``train_step`` of a model, of which a derived class chooses the parts."""

    def loss_of(self, x, y):
        return self.compute_loss(x, y, self(x, training=True))

    def tape(self, tape):
        return tape

    def change(self, gradients):
        return gradients

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.trainable_variables
        gradients = self.change(self.tape(tape).gradient(loss, weights))
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


class OwnStep(Stepping, keras.Sequential):
    """A model with such a step."""


class Crash(keras.callbacks.Callback):
    """Ends ``fit`` after so many batches, counted over all epochs; 0: never."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def set_weights(model: keras.Model, seed: int) -> None:
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=w.shape, scale=0.3) for w in model.get_weights()])


def flip(variable: Any, bit: int) -> None:
    """Flips a bit, counted over all elements."""
    value = np.array(variable)
    value.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    variable.assign(value)


def flat(model: keras.Model) -> np.ndarray:
    return np.concatenate([w.ravel() for w in model.get_weights()])


def assert_bit_identical_on_all_ranks(model: keras.Model) -> None:
    mine = flat(model)
    everyone = hvd.allgather(mine[np.newaxis].view(np.uint8)).numpy()
    assert all((theirs == everyone[0]).all() for theirs in everyone)


def assert_same(values, others) -> None:
    """Checks that variables or arrays are the same, bit for bit."""
    for one, other in zip(values, others, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=getattr(one, "path", ""))


def assert_close(model: keras.Model, other: keras.Model, rtol=1e-4, atol=1e-5) -> None:
    np.testing.assert_allclose(flat(model), flat(other), rtol=rtol, atol=atol)
