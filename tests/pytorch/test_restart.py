"""Restarts on PyTorch end with the bits of a run that nothing has disturbed."""

import re
import sys

import numpy as np
import pytest

SCRIPT = """
    import os, pathlib, signal, sys
    import keras, numpy as np, torch
    import hvd_keras as hvd
    hvd.init()
    folder, kills = pathlib.Path(sys.argv[1]), sys.argv[2:]
    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(203, 6)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    start = keras.initializers.GlorotUniform(seed=3 + hvd.rank())

    class Noisy(keras.layers.Layer):
        def call(self, x, training=False):
            return x + 0.1 * torch.rand(x.shape) if training else x

    model = keras.Sequential([
        keras.Input([6]), Noisy(), keras.layers.Dense(8, "tanh", kernel_initializer=start),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=1),
        keras.layers.Dense(1, kernel_initializer=start, dtype="mixed_bfloat16"),
    ])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size())), "mse")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(rows, 12, shuffle=True)
    if "arrays" in kills:
        source = hvd.data.shard((x, y), batch_size=12)
    else:
        source = hvd.data.shard(loader)

    class Kill(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if kills and self.seen == int(kills[0]) and hvd.rank() == 1:
                mark = folder / "killed"
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

    freq = "epoch" if "epoch" in kills else 4
    model.fit(
        source, epochs=3, verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=2),
            hvd.callbacks.ModelCheckpoint(folder / "best.keras", "loss", save_best_only=True),
            hvd.callbacks.Checkpoint(folder / "states", save_freq=freq),
            Kill(),
        ],
    )
    values = [*model.variables, *model.optimizer.variables]
    values = [np.array(v.numpy(), "float64") for v in values]
    np.savez(folder / f"rank {hvd.rank()}.npz", *values)
"""


def run(hvdrun, name, size, *arguments, options=()):
    hvdrun.environment["KERAS_BACKEND"] = "torch"
    folder = hvdrun.folder / name
    folder.mkdir(exist_ok=True)
    script = hvdrun.script(SCRIPT), *map(str, (folder, *arguments))
    job = hvdrun.run(*options, "-np", str(size), "--oversubscribe", sys.executable, *script)
    assert job.returncode == 0, job.stdout + job.stderr
    ranks = [np.load(folder / f"rank {rank}.npz") for rank in range(size)]
    return [[file[name] for name in file.files] for file in ranks], job.stdout + job.stderr


@pytest.mark.parametrize("where", [[7, "loader"], [22, "arrays"]])
def test_a_killed_rank_changes_nothing(hvdrun, where) -> None:
    expected, _ = run(hvdrun, "undisturbed", 2, 999, *where[1:])
    found, text = run(hvdrun, "killed", 2, *where, options=("--max-restarts", "1"))
    assert (hvdrun.folder / "killed" / "killed").exists()
    assert re.search("continuing from checkpoint-", text), text
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(np.array_equal, mine, theirs))
    assert (hvdrun.folder / "killed" / "best.keras").exists()


def test_an_exception_in_fit_waits_for_the_file(hvdrun) -> None:
    hvdrun.environment["KERAS_BACKEND"] = "torch"
    script = hvdrun.script("""
        import pathlib, time
        import keras, numpy as np
        import hvd_keras as hvd
        from hvd_keras.saving import storage
        hvd.init()
        write = storage.write

        def write_slowly(*arguments):
            time.sleep(1)
            write(*arguments)

        storage.write = write_slowly

        class Interrupt(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    raise KeyboardInterrupt

        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
        x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        checkpoint = hvd.callbacks.Checkpoint("states", save_freq=2)
        try:
            model.fit(
                hvd.data.shard((x, x[:, :1]), batch_size=12), verbose=0,
                callbacks=[broadcast, checkpoint, Interrupt()],
            )
        except KeyboardInterrupt:
            if hvd.rank() == 0:  # which writes
                print("files:", [path.name for path in pathlib.Path("states").glob("*")])
        hvd.barrier()
    """)
    job = hvdrun.run("-np", "2", "--oversubscribe", sys.executable, script)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "files: ['checkpoint-00000-0000002.h5']" in job.stdout, job.stdout
