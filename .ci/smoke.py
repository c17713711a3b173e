"""A short proof, for 2 ranks or more, that an installed hvd_keras works with its MPI.

mpirun -n 2 python .ci/smoke.py {before,after,never}

The word says when mpi4py is imported: before hvd.init(), after it, or not at all.
"""

import os
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hvd_keras as hvd

WHEN = sys.argv[1]

init = hvd.init  # from here on mpi4py knows which MPI to take
if WHEN == "before":
    from mpi4py import MPI
init()
if WHEN == "after":
    from mpi4py import MPI

import keras  # noqa: E402
import numpy as np  # noqa: E402

rank, size = hvd.rank(), hvd.size()
# A launcher of another MPI starts worlds of one rank each, in which all of the below would pass.
assert size >= 2, f"this is a world of {size}"


def own(shape):
    """Differs by rank and by element; sums of it are exact."""
    return np.arange(1, 1 + np.prod(shape), dtype="float32").reshape(shape) * (rank + 1)


def check_collectives():
    ones = own((5, 3)) / (rank + 1)
    total = hvd.allreduce(own((5, 3)), op=hvd.Sum).numpy()
    assert (total == ones * (size * (size + 1) / 2)).all(), total

    # Rank r gives r + 1 rows.
    rows = hvd.allgather(np.full((rank + 1, 2), rank, "int64")).numpy()
    assert (rows[:, 0] == np.repeat(np.arange(size), np.arange(size) + 1)).all(), rows

    # Large, so that it travels another way than small messages do.
    last = hvd.broadcast(own((1 << 20,)), root_rank=size - 1).numpy()
    assert (last == own((1 << 20,)) / (rank + 1) * size).all(), last


def check_mpi4py():
    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank, size)
    total = np.empty(4, "float32")
    MPI.COMM_WORLD.Allreduce(own((4,)), total, op=MPI.SUM)
    assert (total == own((4,)) / (rank + 1) * (size * (size + 1) / 2)).all(), total


def check_training():
    random = np.random.default_rng(rank)
    x, y = random.normal(size=(64, 5)), random.normal(size=(64, 1))
    keras.utils.set_random_seed(rank)
    layers = [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    start = np.concatenate([w.ravel() for w in model.get_weights()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    assert np.isfinite(weights).all()
    assert (weights != start).any(), "nothing was learnt"
    everyone = hvd.allgather(weights[np.newaxis].view("uint8")).numpy()
    assert (everyone == everyone[0]).all(), "the ranks' weights differ"


check_collectives()
if WHEN != "never":
    check_mpi4py()
check_training()
if rank == 0:
    print(f"{size} ranks, mpi4py {WHEN}: ok", flush=True)
