"""Padding and passes in validation; random programs (tests/programs) validate on all kinds."""

import keras
import numpy as np
import pytest

import hvd_keras as hvd
from tests.harness import training

pytestmark = pytest.mark.ranks(1, 2, 3)
SIZE = hvd.size()
STEPS, BATCH = 3, 4
ROWS = STEPS * BATCH * SIZE
X, Y = np.linspace(0, 1, 4 * ROWS, dtype="float32").reshape(ROWS, 4), np.zeros(ROWS, "int64")


def compiled() -> keras.Model:
    kernel = np.random.default_rng(hvd.rank()).normal(size=(4, 2)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.set_weights([kernel, np.zeros(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_padding_for_training_is_told_in_validation(warned) -> None:
    """And padding for evaluation gives the values of one process."""
    model = compiled()
    training.fit(model, data=hvd.data.shard((X, Y), batch_size=BATCH))
    x, y = X[: BATCH * SIZE + 1], Y[: BATCH * SIZE + 1]  # one row in the last step
    average = hvd.callbacks.MetricAverageCallback()
    expected = model.evaluate(x, y, verbose=0)[0]
    for evaluation in (True, False):
        options = {"batch_size": BATCH, "shuffle": False, "evaluation": evaluation}
        data = hvd.data.shard((x, y), uneven="pad", **options)
        loss = model.evaluate(data, callbacks=[average], verbose=0)[0]
        if evaluation:
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        tells = any("evaluation=True" in text for text in warned)
        assert tells == (not evaluation and SIZE > 1 and hvd.rank() == 0)


def test_predictions_of_shuffled_rows_are_told(warned) -> None:
    model = compiled()
    shuffled = hvd.data.shard((X, Y), batch_size=BATCH)
    in_order = hvd.data.shard(X, batch_size=BATCH, shuffle=False)
    model.evaluate(shuffled, verbose=0)
    for data, rows in ((X, ROWS), (in_order, ROWS // SIZE), (shuffled, ROWS // SIZE)):
        assert warned == []
        assert len(model.predict(data, verbose=0)) == rows
    assert ["predict got data" in text for text in warned] == [True] * (hvd.rank() == 0)


def test_validation_begins_with_the_same_pass_on_all_ranks() -> None:
    """Also of data of which a prefetch has begun more passes on one rank."""
    model, average = compiled(), hvd.callbacks.MetricAverageCallback()
    model.set_weights([np.eye(4, 1) * [9, 0], np.zeros(2)])
    model.optimizer.learning_rate = 0.0
    train, validation = (hvd.data.shard((X, Y), batch_size=BATCH) for _ in range(2))
    again = [one.repeat().prefetch(1 + 7 * hvd.rank()) for one in (train, validation)]
    options = {"validation_data": again[1], "validation_steps": STEPS, "callbacks": [average]}
    losses = [model.evaluate(X, Y, verbose=0)[0]]
    for _ in range(2):
        fitted = model.fit(again[0], steps_per_epoch=STEPS, epochs=2, verbose=0, **options)
        losses += fitted.history["val_loss"]
    for data, steps in (again[1], STEPS), (validation, None):
        losses.append(model.evaluate(data, steps=steps, callbacks=[average], verbose=0)[0])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    model.fit(train, verbose=0)
    validation = hvd.data.shard((X, Y), batch_size=BATCH)
    if SIZE > 1 and hvd.rank() == 0:
        next(iter(validation))
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"passes(.|\n)*shuffle=False"):
            model.evaluate(validation, callbacks=[average], verbose=0)
