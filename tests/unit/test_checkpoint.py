"""kill -9 while a checkpoint is written leaves the previous one intact."""

import pathlib
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, sys
import keras, numpy as np
import hvd_keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(8000)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")

class Values(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        # All weights equal the number of the epoch: a mixture of two files would show.
        model.set_weights([np.full(w.shape, epoch) for w in model.get_weights()])
        print("epoch", epoch, flush=True)

callbacks = [Values(), hvd.callbacks.ModelCheckpoint(sys.argv[1])]
model.fit(np.zeros((1, 1000)), np.zeros((1, 8000)), epochs=10**6, verbose=0, callbacks=callbacks)
"""

LOAD = """
import sys
import keras, numpy as np
weights = [w.ravel() for w in keras.models.load_model(sys.argv[1]).get_weights()]
weights = np.concatenate(weights)
assert (weights == weights[0]).all(), "a mixture of two checkpoints"
print("whole")
"""


@pytest.mark.parametrize("pause", [0.17, pytest.param(0.05, marks=pytest.mark.slow)])
def test_kill_in_mid_write_leaves_a_loadable_checkpoint(
    tmp_path: pathlib.Path, pause: float
) -> None:
    path = tmp_path / "new folder" / "model.keras"
    command = [sys.executable, "-c", SCRIPT, str(path)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "epoch 2\n":
                break
        time.sleep(pause)  # during the third write, of about 30 MB
        process.kill()
    command = [sys.executable, "-c", LOAD, str(path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert result.stdout == "whole\n", result.stderr
