"""If rank 0 fails in something that it does alone, the other ranks must get the error."""

import pathlib

from tests.harness import ranks

SCRIPT = """
import sys
import keras, numpy as np
import hvd_keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x, y = np.full((8, 2), hvd.rank()), np.ones((8, 1))
log = keras.callbacks.CSVLogger("FOLDER/no such folder/log.csv")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), log]
model.fit(x, y, epochs=3, verbose=0, callbacks=callbacks)
hvd.allreduce([1.0], name="after")
print("both went on", flush=True)
"""


def test_keras_callback_that_cannot_write(tmp_path: pathlib.Path) -> None:
    """For ModelCheckpoint all ranks wait: test_callbacks.py."""
    job = ranks.run_script(tmp_path, 2, SCRIPT.replace("FOLDER", str(tmp_path)), timeout=900)
    assert job.status != 0
    assert str(tmp_path) in job.output
    assert "rank 0 has left the job" in job.output, job.output
    assert "both went on" not in job.output
