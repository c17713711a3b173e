"""A table that the ranks divide needs no room on one of them."""

import pathlib

import pytest

from tests.harness import ranks

MEMORY = """
import resource, sys
import keras
import numpy as np
import hvd_keras as hvd

hvd.init()
rows, columns, room = 1 << 22, 64, 950 << 20  # the table has 1 GiB
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
shard = "rows" if hvd.size() > 1 else None
model = keras.Sequential([
    keras.Input((4,), dtype="int64"),
    hvd.layers.Embedding(rows, columns, shard=shard, combiner="sum"),
    keras.layers.Dense(1),
])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
model.compile(optimizer, loss="mse", run_eagerly=True)
ids = np.random.default_rng(hvd.rank()).integers(0, rows, (64, 4))
model.fit(ids, np.ones((64, 1)), batch_size=16, verbose=0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
print("trained", flush=True)
"""


@pytest.mark.slow
def test_a_table_that_one_rank_cannot_hold_trains_on_four(tmp_path: pathlib.Path) -> None:
    # Threads have stacks and heaps of their own, which count as address space.
    settings = {"MALLOC_ARENA_MAX": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    one = ranks.run_script(tmp_path, 1, MEMORY, timeout=900, **settings)
    assert one.status != 0, one.output
    assert "trained" not in one.output
    four = ranks.run_script(tmp_path, 4, MEMORY, timeout=900, **settings)
    assert four.status == 0, four.output
    assert four.output.count("trained") == 4
