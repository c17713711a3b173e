"""Padding in validation; random programs (tests/programs) validate on data of all kinds."""

import keras
import numpy as np
import pytest

import hvd_keras as hvd

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
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(
        hvd.data.shard((X, Y), batch_size=BATCH), callbacks=[broadcast], shuffle=False, verbose=0
    )
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
