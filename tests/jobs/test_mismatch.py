"""Ranks that wait for different collectives, so that none can continue."""

import pathlib
import re

from hvd_keras import postmortem
from tests.harness import ranks

SCRIPT = """
    import keras
    import numpy as np
    import tensorflow as tf
    import hvd_keras as hvd

    hvd.init()
    try:
        hvd.allreduce(tf.ones(1), name="a" if hvd.rank() == 0 else "b")
    except tf.errors.FailedPreconditionError:
        total = hvd.allreduce(tf.constant(1 + hvd.rank()), op=hvd.Sum, name="both")
        print("both have", int(total))

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    rows = 12 if hvd.rank() == 0 else 8
    x = np.full((rows, 3), 1.0 + hvd.rank(), "float32")
    batches = ((x[i : i + 4], x[i : i + 4, :2]) for i in range(0, rows, 4))  # of unknown number
    try:
        model.fit(batches, verbose=0)
    except tf.errors.FailedPreconditionError as error:
        print("rank", hvd.rank(), "got:", str(error).replace(chr(10), " "))
        raise
"""


def test_ranks_that_bear_it_go_on_and_one_with_more_batches_ends(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "postmortem"
    settings = {"HVD_MISMATCH_SECONDS": "1", "HVD_POSTMORTEM": str(folder)}
    job = ranks.run_script(tmp_path, 2, SCRIPT, timeout=900, **settings)
    assert job.output.count("both have 3") == 2, job.output
    assert job.status != 0
    for rank in range(2):
        told = next(line for line in job.output.splitlines() if f"rank {rank} got:" in line)
        assert "rank 0 has submitted: allreduce" in told
        assert "rank 1 has submitted: allgather 'an epoch of fit has ended" in told
        assert "hvd.data.agree_on_steps" in told
    # Until then, an allreduce has followed the last that both ranks have run.
    what, where = postmortem.conclusion(folder).splitlines()
    assert re.match(
        "rank 1 called allgather 'an epoch of fit has ended.*' while rank 0 waited for all", what
    )
    assert re.match(
        rf"  rank 1 was at {tmp_path}/script.py:\d+, in <module>: model.fit\(batches", where
    )


STOPS = """
    import keras
    import numpy as np
    import tensorflow as tf
    import hvd_keras as hvd

    hvd.init()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = hvd.rank() == 1 and batch == stops_in

    x = np.full((12, 3), 1.0 + hvd.rank(), "float32")
    for stops_in, known in enumerate((True, False)):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
        data = data if known else data.filter(lambda x, y: True)
        own = hvd.callbacks
        callbacks = own.BroadcastGlobalVariablesCallback(0), own.MetricAverageCallback(), Stop()
        try:
            model.fit(data, verbose=0, validation_data=(x, x[:, :1]), callbacks=list(callbacks))
        except tf.errors.FailedPreconditionError:
            hvd.barrier()
"""


def test_a_rank_that_stops_within_an_epoch_is_told(tmp_path: pathlib.Path) -> None:
    """Also if it next waits in another callback, or if the number of batches is unknown."""
    job = ranks.run_script(tmp_path, 2, STOPS, timeout=900, HVD_MISMATCH_SECONDS="1")
    assert job.status == 0, job.output
    for batch in (1, 2):
        told = f"rank 1: a callback of this rank set stop_training in batch {batch}: let all ranks"
        assert job.output.count(told) == 1, job.output
