"""XLA: failures in compiled functions, and jobs in which XLA cannot compile collectives."""

import pathlib

import pytest

from tests.harness import ranks

ENDS = """
import time
import tensorflow as tf
import hvd_keras as hvd

hvd.init()
step = tf.function(lambda x: hvd.allreduce(x, name="gradient") * 2.0, jit_compile=True)
for i in range(12):  # for the first ten requests the deadline is generous
    step(tf.ones(4))
if hvd.rank() == 1:
    FAULT
try:
    step(tf.ones(4))
except tf.errors.OpError as error:
    print(f"rank {hvd.rank()} heard: {type(error).__name__} {error.message}", flush=True)
    raise
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        (
            "time.sleep(6)",
            [
                "rank 0 heard: DeadlineExceededError",
                "waits for allreduce 'gradient', which rank 1",
            ],
        ),
        (
            "raise ValueError('no data')",
            ["rank 0 heard: AbortedError", "rank 1 has left the job: ValueError: no data"],
        ),
    ],
)
def test_a_rank_that_ends_or_does_not_come(tmp_path, fault: str, texts: list[str]) -> None:
    script = ENDS.replace("FAULT", fault)
    job = ranks.run_script(tmp_path, 2, script, timeout=900, HVD_TIMEOUT_SECONDS="2")
    assert job.status != 0
    for text in texts:
        assert text in job.output, job.output


FALLBACK = """
import os, pathlib, shutil
import keras, numpy as np
import hvd_keras as hvd

# The package's folder, as it would be with a library that is broken.
folders = map(pathlib.Path, hvd.__path__)
installed = next(folder for folder in folders if (folder / "native").exists())
folder = pathlib.Path(__file__).parent / f"libraries-{os.getpid()}"
shutil.copytree(installed, folder)
for library in folder.glob("native/tf*/libhvd_xla.so"):
    library.write_text("no library")
hvd.__path__[list(hvd.__path__).index(str(installed))] = str(folder)

import tensorflow as tf
hvd.init()
try:
    tf.function(lambda: hvd.allreduce(tf.ones(2)), jit_compile=True)()
except NotImplementedError as error:
    print("refused:", *str(error).split("NotImplementedError: ")[1:], flush=True)
for _ in range(2):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    x, y = np.random.default_rng(hvd.rank()).normal(size=(2, 8, 2))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y[:, :1], verbose=0, callbacks=callbacks)
    kernels = hvd.allgather(model.get_weights()[0][None]).numpy()
    assert (kernels == kernels[0]).all() and not model.jit_compile
print("trained", flush=True)
"""


@pytest.mark.slow
def test_library_that_does_not_load(tmp_path: pathlib.Path) -> None:
    job = ranks.run_script(tmp_path, 2, FALLBACK, timeout=900, status=0)
    assert job.output.count("trained\n") == 2
    assert job.output.count("refused: XLA cannot compile hvd.allreduce here: ") == 2
    warning = "WARNING rank 0: models train without XLA (jit_compile=False): "
    assert job.output.count(warning) == 1, job.output  # one line for all ranks of a host
    assert "libhvd_xla.so does not load: " in job.output
