"""``fit`` validates on the validation data, whatever its training data are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import log

pytestmark = pytest.mark.ranks(1, 2, 3)
SIZE = hvd.size()
STEPS, BATCH = 3, 4
ROWS = STEPS * BATCH * SIZE
# The labels of the validation contradict those of the training, and so does each loss.
X, Y = np.linspace(0, 1, 4 * ROWS, dtype="float32").reshape(ROWS, 4), np.zeros(ROWS, "int64")
V, W = X[: 2 * BATCH * SIZE, ::-1].copy(), np.ones(2 * BATCH * SIZE, "int64")


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return STEPS * SIZE

    def __getitem__(self, index: int):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def rows(x=X, y=Y) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y))


def shard(source, **options) -> tf.data.Dataset:
    return hvd.data.shard(source, batch_size=BATCH, **options)


TRAINING = {
    "arrays": lambda: shard((X, Y)),
    "rows": lambda: shard(rows()),
    "rows in order": lambda: shard(rows(), shuffle=False),
    "batches": lambda: hvd.data.shard(rows().batch(BATCH)),
    "shuffled": lambda: shard(rows().shuffle(ROWS, seed=1)),
    "mapped": lambda: shard(rows()).map(lambda x, y: (2 * x, y)).prefetch(2),
    "repeated": lambda: shard(rows()).repeat(),
    "repeated arrays": lambda: shard((X, Y)).repeat(),
    "PyDataset": lambda: hvd.data.shard(Batches()),
    "each rank's own": lambda: rows().shard(SIZE, hvd.rank()).batch(BATCH),
}
VALIDATION = {
    "arrays": lambda: (V, W),
    "sharded arrays": lambda: shard((V, W), shuffle=False),
    "sharded rows": lambda: shard(rows(V, W), shuffle=False),
    "dataset": lambda: rows(V, W).batch(BATCH),
}


def compiled() -> keras.Model:
    kernel = np.random.default_rng(hvd.rank()).normal(size=(4, 2)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.set_weights([kernel, np.zeros(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Looking(keras.callbacks.Callback):
    """Evaluates and predicts on the validation's rows, beside ``fit``'s own validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None) -> None:
        predicted = self.model.predict(V, verbose=0)
        found = self.model.evaluate(V, W, verbose=0, return_dict=True)
        found["predicted"] = -np.log(predicted[:, 1]).mean()
        self.seen.append(found)


@pytest.mark.cases(6)
@pytest.mark.parametrize("averages", [True, False], ids=["average", "without"])
@pytest.mark.parametrize("validation", VALIDATION)
@pytest.mark.parametrize("training", TRAINING)
def test_validation_reads_its_own_rows(training: str, validation: str, averages: bool) -> None:
    """In the first fit and in a second one, which goes on with the same data."""
    model, data = compiled(), TRAINING[training]()
    steps = STEPS if "repeated" in training else None
    for _ in range(2):
        looking = Looking()
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        callbacks += [hvd.callbacks.MetricAverageCallback()] * averages
        history = model.fit(
            data,
            epochs=2,
            steps_per_epoch=steps,
            shuffle=False,
            verbose=0,
            validation_data=VALIDATION[validation](),
            callbacks=[*callbacks, looking],
        ).history
        losses, accuracies = ([one[name] for one in looking.seen] for name in ("loss", "accuracy"))
        np.testing.assert_allclose([one["predicted"] for one in looking.seen], losses, rtol=1e-5)
        assert losses[-1] > np.log(2) > history["loss"][-1]
        if averages or "sharded" not in validation:  # otherwise each rank has its own rows' mean
            np.testing.assert_allclose(history["val_loss"], losses, rtol=1e-5)
            np.testing.assert_allclose(history["val_accuracy"], accuracies, rtol=1e-5)
        else:
            assert history["val_loss"][-1] > np.log(2)


def test_padding_for_training_is_told_in_validation(monkeypatch) -> None:
    """And padding for evaluation gives the values of one process."""
    told: list[str] = []
    monkeypatch.setattr(log, "warn_once", told.append)
    model = compiled()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(TRAINING["arrays"](), callbacks=[broadcast], shuffle=False, verbose=0)
    x, y = X[: BATCH * SIZE + 1], Y[: BATCH * SIZE + 1]  # one row in the last step
    average = hvd.callbacks.MetricAverageCallback()
    expected = model.evaluate(x, y, verbose=0)[0]
    for evaluation in (True, False):
        data = shard((x, y), uneven="pad", shuffle=False, evaluation=evaluation)
        loss = model.evaluate(data, callbacks=[average], verbose=0)[0]
        if evaluation:
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        tells = any("evaluation=True" in text for text in told)
        assert tells == (not evaluation and SIZE > 1 and hvd.rank() == 0)
