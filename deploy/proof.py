"""Trains a small convolutional network; on any number of ranks, the result is that of one process.

python proof.py FILE SIZE: SIZE is how many ranks there must be. One process writes its weights to
FILE, several compare theirs with it.
"""

import sys
import time

import numpy as np
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import libraries
from hvd_keras.runtime.keras import keras

begin = time.perf_counter()
hvd.init()
file, size = sys.argv[1], int(sys.argv[2])
# A launcher of another MPI would start worlds of one rank each.
assert hvd.size() == size, f"this is a world of {hvd.size()}, not of {size}"

random = np.random.default_rng(1)
x = random.normal(size=(256, 8, 8, 1)).astype("float32")
y = (x.mean(axis=(1, 2)) > 0).astype("int32")
# The ranks' batches together are the batch of one process.
x, y = x[hvd.rank() :: size], y[hvd.rank() :: size]

compiled = not libraries.why_no_xla()
for jit_compile in (False, True) if compiled else (False,):
    keras.utils.set_random_seed(2 + hvd.rank())  # the broadcast makes the weights equal
    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3, activation="relu")]
    layers += [keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss, jit_compile=jit_compile)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y, batch_size=32 // size, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    if size == 1 and not jit_compile:
        np.save(file, weights)
    np.testing.assert_allclose(weights, np.load(file), rtol=0, atol=1e-4)

if hvd.rank() == 0:
    mpi = libraries.mpi_version().splitlines()[0].split(",")[0].strip()
    print(
        f"proof: {size} as one: TensorFlow {tf.__version__}, Keras {keras.__version__}, {mpi}, "
        f"XLA {'too' if compiled else 'not: ' + libraries.why_no_xla()[:200]}, "
        f"{time.perf_counter() - begin:.1f} s",
        flush=True,
    )
