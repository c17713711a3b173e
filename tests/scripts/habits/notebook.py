"""Cells of a notebook: a function that trains, and hvd.run, which calls it on two ranks.

expect: equal
run: itself
"""

# %%
import os

import numpy as np

import hvd_keras as hvd

BATCH = 32
random = np.random.default_rng(0)
x = random.normal(size=(256, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)


# %%
def train(rate, epochs=2):
    import keras

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), loss="mse")
    history = model.fit(
        x[hvd.rank() :: hvd.size()],
        y[hvd.rank() :: hvd.size()],
        batch_size=BATCH // hvd.size(),
        epochs=epochs,
        shuffle=False,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
        verbose=0,
    )
    print(f"loss {history.history['loss'][-1]:.3f}")
    return model.get_weights(), history.history["loss"]


# %%
[(alone, losses)] = hvd.run(train, args=(0.02,), np=1)
(first, losses_of_two), (second, _) = hvd.run(
    train, args=(0.02,), kwargs={"epochs": 2}, np=2, options=["--oversubscribe"]
)

# %%
np.testing.assert_allclose(losses, losses_of_two, rtol=1e-4)
for a, b, c in zip(alone, first, second):
    np.testing.assert_array_equal(b, c)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
np.savez(f"{os.environ['RESULT']}/0", *first)
