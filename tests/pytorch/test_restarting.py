"""Restarts on PyTorch end with the bits of a run that nothing has disturbed."""

import re
import sys

import numpy as np
import pytest

SCRIPT = """
    import os, pathlib, signal, sys
    import torch
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
    script = hvdrun.script("""
        import pathlib, time
        from hvd_keras.saving import storage
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
                hvd.data.shard((x, x[:, :1]), batch_size=12), steps_per_epoch=3, verbose=0,
                callbacks=[broadcast, checkpoint, Interrupt()],
            )
        except KeyboardInterrupt:
            if hvd.rank() == 0:  # which writes
                print("files:", [path.name for path in pathlib.Path("states").glob("*")])
        hvd.barrier()
    """)
    job = hvdrun.run("-np", "2", "--oversubscribe", sys.executable, script, status=0)
    assert "will begin the data anew: its passes end within the epochs of fit" in job.stderr
    assert "files: ['checkpoint-00000-0000002.h5']" in job.stdout, job.stdout


def test_optimizers_of_which_a_step_alone_knows_the_variables_go_on(hvdrun) -> None:
    script = """
        import torch

        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.nets = [keras.layers.Dense(4, kernel_initializer="ones") for _ in range(2)]
                adam = keras.optimizers.Adam
                self.own = [hvd.DistributedOptimizer(adam(0.01)) for _ in self.nets]
            def call(self, x):
                return self.nets[1](self.nets[0](x))
            def train_step(self, data):
                for net, optimizer in zip(self.nets, self.own):
                    self.zero_grad()
                    loss = torch.mean((self(data) - data) ** 2)
                    loss.backward()
                    with torch.no_grad():
                        optimizer.apply([w.value.grad for w in net.weights], net.weights)
                return {"loss": loss.detach()}

        class Crash(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    raise KeyboardInterrupt

        x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        def trained(folder, *crash):
            model = Two()
            model.compile()
            data = hvd.data.shard(x, batch_size=8)
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *crash]
            callbacks += [hvd.callbacks.Checkpoint(folder, save_freq=2)]
            try:
                model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
            except KeyboardInterrupt:
                return trained(folder)
            return [v.numpy() for v in model.variables + model.own[0].variables]

        for one, other in zip(trained("undisturbed"), trained("again", Crash()), strict=True):
            np.testing.assert_array_equal(one, other)
        print("done")
    """
    job = hvdrun.python(2, script)
    assert job.stdout.count("done") == 2, job.stderr
    assert "continuing from checkpoint-00000-0000002, epoch 1 of 2, batch 3" in job.stderr


OTHER = """
    import pathlib, sys
    folder, epochs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
    for name, optimizer in {
        "adam": keras.optimizers.Adam(0.01),
        "momentum": keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    }.items():
        layers = [keras.layers.Dense(n, "tanh") for n in (8, 1)]
        model = keras.Sequential([keras.Input([6]), *layers])
        start = np.random.default_rng(3 + hvd.rank())  # not the backend's
        model.set_weights([0.5 * start.normal(size=w.shape) for w in model.get_weights()])
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        model.fit(
            hvd.data.shard((x, x[:, :1] * x[:, 1:2]), batch_size=24 // hvd.size()),
            epochs=epochs, verbose=0,
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.LearningRateScheduleCallback(0.01, lambda epoch: 0.9**epoch),
                hvd.callbacks.Checkpoint(folder / name),
            ],
        )
        values = [v.numpy() for v in [*model.variables, *optimizer.variables]]
        np.savez(folder / f"{name} {hvd.rank()}.npz", *values)
"""


def test_checkpoints_continue_on_the_other_backend(hvdrun) -> None:
    def trained(folder, *parts):
        for backend, size, epochs in parts:
            hvdrun.environment["KERAS_BACKEND"] = backend
            (hvdrun.folder / folder).mkdir(exist_ok=True)
            script = hvdrun.script(OTHER), folder, str(epochs)
            job = hvdrun.run("-np", str(size), "--oversubscribe", sys.executable, *script, status=0)
            text = job.stdout + job.stderr
            assert (epochs == 2 or len(parts) == 1) == ("continuing from" not in text), text
        paths = sorted((hvdrun.folder / folder).glob("*.npz"))
        return {path.name: list(np.load(path).values()) for path in paths}

    alone = trained("alone", ("torch", 1, 4))
    for one, other in (("torch", "tensorflow"), ("tensorflow", "torch")):
        found = trained(one, (one, 2, 2), (other, 2, 4))
        assert len(found) == 4
        for name, values in found.items():
            expected = alone[f"{name.split()[0]} 0.npz"]
            assert len(values) == len(expected) > 8
            for mine, theirs in zip(values, expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
