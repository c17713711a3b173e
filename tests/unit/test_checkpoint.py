"""kill -9 while a checkpoint is written leaves the previous one intact."""

import os
import pathlib
import random
import subprocess
import sys
import textwrap
import time

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
for path in sys.argv[1:]:
    weights = np.concatenate([w.ravel() for w in keras.models.load_model(path).get_weights()])
    assert (weights == weights[0]).all(), "a mixture of two checkpoints"
    print("whole")
"""


def test_kill_in_mid_write_leaves_a_loadable_checkpoint(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "load.py").write_text(textwrap.dedent(LOAD))
    moment = random.Random(0)
    paths = []
    for i in range(2):
        path = tmp_path / f"run {i}" / "model.keras"
        paths.append(path)
        process = subprocess.Popen(
            [sys.executable, "train.py", str(path)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line == "epoch 2\n":
                break
        time.sleep(moment.uniform(0, 0.2))  # during the third write, of about 30 MB
        process.kill()
        process.wait()
        process.stdout.close()
    result = subprocess.run(
        [sys.executable, "load.py", *map(str, paths)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.stdout.count("whole") == len(paths), result.stderr
