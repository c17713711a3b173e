"""Models without variables before their first step: everything before that step works."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.patches import registry
from hvd_keras.runtime.keras import require
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
ROWS, BATCH = training.STEPS * training.BATCH, training.BATCH


def sequential() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)])


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(6, activation="tanh")
        self.second = keras.layers.Dense(2)

    def call(self, x):
        return self.second(self.first(x))


class OwnStep(training.Stepping, Subclassed):
    """Its step unpacks two values, not three."""


class InFunction(OwnStep):
    """Its step is a function that AutoGraph converts."""

    @tf.function
    def in_function(self, data):
        rows = tf.shape(data[0])[0]
        while rows > 1:
            rows //= 2
        return super().train_step(data)

    def train_step(self, data):
        return self.in_function(data)


class OwnLoss(Subclassed):
    """A layer is called in the loss for the first time."""

    def call(self, x):
        return self.first(x)

    def compute_loss(self, x, y, y_pred, *_, **__):
        return keras.ops.mean((self.second(y_pred) - y) ** 2)


def data():
    random = np.random.default_rng(3)
    return [random.normal(size=(ROWS * SIZE, n)).astype("float32") for n in (5, 2)]


def share(array):
    return training.shard(array, RANK, SIZE)


def arrays(x, y, batch):
    return {"x": x, "y": y, "batch_size": batch}


def of_unknown_shape(x, y, batch):
    """A generator: neither the batch nor the length of a row is known."""
    columns = x.shape[1]

    def batches():
        for i in range(0, len(x), batch):
            yield x[i : i + batch], y[i : i + batch]

    spec = (tf.TensorSpec((None, columns)), tf.TensorSpec((None, None)))
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=spec)}


class AtBegin(keras.callbacks.Callback):
    """Records the state after the broadcast and before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = self.rates = None

    def on_train_begin(self, logs=None) -> None:
        self.weights = self.model.get_weights()
        self.rates = [float(v) for v in self.model.optimizer.variables if v.name == "learning_rate"]


# Random programs (tests/programs) compare such models with one process.
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("make", "feed", "options"),
    [
        (sequential, of_unknown_shape, {}),
        (Subclassed, of_unknown_shape, {"jit_compile": False}),
        (OwnLoss, arrays, {}),
        (InFunction, arrays, {}),
        (OwnStep, of_unknown_shape, {"run_eagerly": True}),
    ],
)
def test_first_step_begins_with_the_roots_weights(make, feed, options) -> None:
    keras.utils.set_random_seed(11 + RANK)
    x, y = data()
    together, begin = make(), AtBegin()
    optimizer = keras.optimizers.SGD(0.02 * (1 + RANK), momentum=0.9)  # the root's rate must win
    together.compile(hvd.DistributedOptimizer(optimizer), loss="mse", **options)
    root = hvd.callbacks.BroadcastGlobalVariablesCallback(SIZE - 1)
    fed = feed(share(x), share(y), BATCH)
    together.fit(**fed, epochs=2, shuffle=False, verbose=0, callbacks=[root, begin])
    training.assert_bit_identical_on_all_ranks(together)
    assert begin.rates == pytest.approx([0.02 * SIZE])
    keras.utils.set_random_seed(11 + SIZE - 1)
    own = (Subclassed if make is OwnLoss else make)()
    own(x[:1])
    for mine, theirs in zip(begin.weights, own.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)  # as on the root, before any step


def test_one_callback_serves_several_models_and_fits() -> None:
    x, y = data()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for fold in range(3):
        keras.utils.set_random_seed(100 * fold + RANK)
        model = sequential() if fold else training.dense_model()
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
        model.fit(share(x), share(y), batch_size=BATCH, verbose=0, callbacks=[broadcast])
        training.assert_bit_identical_on_all_ranks(model)
    # A rank loads other weights; the next fit begins with the root's nevertheless.
    model.set_weights([w + RANK for w in model.get_weights()])
    model.fit(share(x), share(y), batch_size=BATCH, verbose=0, callbacks=[broadcast])
    training.assert_bit_identical_on_all_ranks(model)


class ReadsValues(Subclassed):
    """A model that cannot be traced, because it needs values."""

    def call(self, x):
        return super().call(x * float(x.numpy().max() >= 0))


class ReadsValuesInStep(OwnStep, ReadsValues):
    pass


def test_eager_model_that_cannot_be_traced() -> None:
    x, y = data()
    keras.utils.set_random_seed(RANK)
    model, begin = training.compiled(ReadsValues(), run_eagerly=True), AtBegin()
    training.fit(model, begin, data=(share(x), share(y)))
    training.assert_bit_identical_on_all_ranks(model)
    weights = np.concatenate([w.ravel() for w in begin.weights])[np.newaxis]
    assert (hvd.allgather(weights).numpy() == weights).all()


def test_step_that_cannot_be_traced_is_refused_on_all_ranks() -> None:
    x, y = data()
    model = training.compiled(ReadsValuesInStep(), run_eagerly=True)
    with pytest.raises(ValueError, match=r"has no variables yet(.|\n)*call it once on a batch"):
        training.fit(model, data=(share(x), share(y)))
    model(tf.constant(x[:1]))  # as the text says
    training.fit(model, data=(share(x), share(y)))
    training.assert_bit_identical_on_all_ranks(model)


def test_the_documentation_names_every_class_that_is_patched() -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "design.md").read_text()
    for owner, *_ in registry._rows():
        name = owner.__name__.rpartition(".")[2]
        assert re.search(rf"`(tf\.)?{name}`", text), owner


def test_keras_is_patched_once() -> None:
    patched = keras.Model.fit
    registry.install()
    assert keras.Model.fit is patched
    with pytest.raises(RuntimeError, match=r"needs Model.no_such_method to test(.|\n)*pip install"):
        require(keras.Model, "no_such_method", "to test")
