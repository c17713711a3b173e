"""Data, steps, callbacks and warnings of ``fit`` on PyTorch."""

import sys

import numpy as np
import pyarrow
from pyarrow import parquet


def test_files_and_datasets_have_the_rows_of_tensorflow(hvdrun) -> None:
    script = """
        import sys
        kind, name = sys.argv[1:]
        if kind == "files":
            def double(columns, seeds=None):
                assert type(columns["x"]).__module__.split(".")[0] in ("torch", "tensorflow")
                rows = keras.ops.cast(seeds[:, 1:], "float32")
                return columns["x"] * 2, rows + columns["y"][:, None] / 1000

            source = hvd.data.files("rows-*.parquet", map=double, seeds=True)
            data = hvd.data.shard(source, batch_size=8, shuffle=16, uneven="pad")
        else:
            import tensorflow as tf
            rows = np.arange(100.0, dtype="float32").reshape(50, 2)
            source = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).shuffle(9, seed=3)
            data = hvd.data.shard(source.batch(8), uneven="share")
        assert hvd.data.shard.__module__.endswith("torch.data") == (name == "torch")
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input([2]), layer])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-6, momentum=0.5)), "mse")
        saved = hvd.callbacks.Checkpoint(f"{kind} {name}")
        model.fit(data, epochs=2, callbacks=[saved], verbose=0)
        seen = [[np.asarray(part) for part in batch] for batch in data]  # the third pass
        values = {f"{i} {j}": p for i, parts in enumerate(seen) for j, p in enumerate(parts)}
        np.savez(f"{name} {hvd.rank()}.npz", *model.get_weights(), **values)
        on_torch = keras.backend.backend() == "torch"
        if on_torch and kind == "files":
            assert "tensorflow" not in sys.modules
            try:
                hvd.data.shard(hvd.data.files(["a.tfrecord"]), batch_size=2)
            except NotImplementedError as error:
                assert "expected .parquet files" in str(error)
            else:
                raise AssertionError
    """
    script = hvdrun.script(script)
    for number, first in enumerate((0, 37, 40)):
        numbers = np.arange(first, (37, 40, 75)[number], dtype="float32")
        columns = {"x": list(np.stack([numbers, -numbers], 1)), "y": numbers}
        parquet.write_table(pyarrow.table(columns), hvdrun.folder / f"rows-{number}.parquet")
    for kind in ("files", "dataset"):
        for backend in ("tensorflow", "torch"):
            hvdrun.environment["KERAS_BACKEND"] = backend
            job = hvdrun.run("-np", "2", "--oversubscribe", sys.executable, script, kind, backend)
            assert job.returncode == 0, job.stdout + job.stderr
        for rank in range(2):
            paths = (hvdrun.folder / f"{name} {rank}.npz" for name in ("torch", "tensorflow"))
            ours, theirs = map(np.load, paths)
            assert ours.files == theirs.files
            assert len(ours.files) > 8
            for name in ours.files:
                np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


def test_all_rows_count_alike(hvdrun) -> None:
    """In batches of other sizes on each rank, and if a loss of whole batches gets one row."""
    script = """
        x = np.random.default_rng(0).normal(size=(36, 6)).astype("float32")
        y = (x[:, :1] > 0).astype("float32")
        rank = hvd.rank()

        def trained(loss, rows, batch, optimizer):
            start = keras.initializers.GlorotUniform(seed=1)
            layers = [keras.layers.Dense(4, "tanh", kernel_initializer=start)]
            layers += [keras.layers.Dense(1, "sigmoid", kernel_initializer=start)]
            model = keras.Sequential([keras.Input([6]), *layers])
            model.compile(optimizer(keras.optimizers.SGD(0.5)), loss)
            how = {"batch_size": batch, "shuffle": False, "epochs": 3, "verbose": 0}
            # What a callback of one rank computes is of that rank.
            used = [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: rank or loss(y, y))]
            used += [hvd.callbacks.MetricAverageCallback()] if optimizer is distributed else []
            logs = model.fit(x[rows], y[rows], callbacks=used, **how).history
            return [*map(np.array, model.weights), logs["loss"]]

        distributed = hvd.DistributedOptimizer
        for loss, rows, batch in (
            (keras.losses.MeanSquaredError(), [slice(24), slice(24, None)][rank], 36),
            (keras.losses.Dice(), slice(rank, None, 2), 1),
        ):
            together = trained(loss, rows, batch, distributed)
            with hvd.local_fit():
                alone = trained(loss, slice(None), max(2, batch), lambda optimizer: optimizer)
            for one, other in zip(together, alone, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(distributed(keras.optimizers.SGD(0.1)), "mse")
        # Each rank has sequences of its own length.
        model.fit(np.ones((4, 2 + rank, 3)), np.ones((4, 2 + rank, 1)), 1, verbose=0)
        print("done")
    """
    assert hvdrun.python(2, script, status=0).stdout.count("done") == 2


def test_a_compiled_step(hvdrun) -> None:
    script = """
        import torch
        x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
        mine = x[:32] if hvd.rank() == 0 else x[32:]
        found = []
        for compiled in (False, True):
            start = keras.initializers.GlorotUniform(seed=1)
            layers = [keras.layers.Dense(n, "tanh", kernel_initializer=start) for n in (8, 1)]
            model = keras.Sequential([keras.Input([6]), *layers])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
            model.compile(optimizer, "mse", jit_compile=compiled)
            size = 8 - 4 * hvd.rank()
            model.fit(mine, mine[:, :1], size, epochs=2, shuffle=False, verbose=0)
            found.append([v.numpy() for v in model.weights])
        for one, two in zip(*found):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
        print("done")
    """
    hvdrun.environment["TORCHINDUCTOR_CACHE_DIR"] = str(hvdrun.folder / "inductor")
    assert hvdrun.python(2, script, status=0).stdout.count("done") == 2


def test_data_of_unequal_length_ends_with_an_error(hvdrun) -> None:
    script = """

        def batches():
            for _ in range(3 + hvd.rank()):
                yield np.ones([2, 3]) * (1 + hvd.rank()), np.ones([2, 1])

        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input([3]), layer])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.fit(batches(), epochs=1, verbose=0)
    """
    job = hvdrun.python(2, script)
    assert job.returncode != 0
    assert "the ranks wait for different collectives" in job.stderr, job.stderr


def test_validation_in_unequal_numbers_of_steps_is_told(hvdrun) -> None:
    script = """
        import sys
        x = np.random.default_rng(hvd.rank()).integers(0, 3, [16, 5])
        layers = [keras.layers.Embedding(3, 2, mask_zero=True), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input([5]), *layers])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        for rows in (8, [4, 8][hvd.rank()]):
            print(f"validate {rows}", file=sys.stderr, flush=True)
            hvd.barrier()
            held_out = x[:rows], x[:rows, :, None]
            model.fit(x, x[..., None], batch_size=4, validation_data=held_out, verbose=0,
                      callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                                 hvd.callbacks.MetricAverageCallback()])
    """
    job = hvdrun.python(2, script, status=0)
    warning = "the ranks validate in different numbers of batches"
    assert job.stderr.count(warning) == 1
    assert warning not in job.stderr.split("validate 4")[0]


def test_ranks_that_train_separately_are_an_error_or_warned_of(hvdrun) -> None:
    script = """
        x = np.arange(64.0).reshape(16, 4) / 64
        start = keras.initializers.Constant(0.1 * hvd.rank())
        for distributed in (True, False):
            layer = keras.layers.Dense(1, kernel_initializer=start)
            model = keras.Sequential([keras.Input([4]), layer])
            optimizer = keras.optimizers.SGD(0.1)
            model.compile(hvd.DistributedOptimizer(optimizer) if distributed else optimizer, "mse")
            model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
    """
    hvdrun.environment["HVD_STRICT"] = "0"
    job = hvdrun.python(2, script, status=0)
    assert "the 2 ranks began to train with different weights" in job.stderr
    assert "all 2 ranks train on the same rows" in job.stderr
    assert "optimizer SGD applies gradients of this rank alone" in job.stderr
    del hvdrun.environment["HVD_STRICT"]
    job = hvdrun.python(2, script, status=1)
    assert "ValueError: hvd_keras: all 2 ranks train on the same rows" in job.stderr


def test_loaders_of_equal_labels_in_another_order_are_refused(hvdrun) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Rows(Dataset):
            def __init__(self, first):
                self.first = first
            def __len__(self):
                return 16
            def __getitem__(self, i):
                return np.float32([(i + self.first) % 16]) + noise * torch.rand(1).numpy(), 0

        torch.manual_seed(hvd.rank())
        for noise in (0, 1e-2):
            hvd.data.shard(DataLoader(Rows(0), 4, shuffle=True))
            try:
                hvd.data.shard(DataLoader(Rows(hvd.rank()), 4, shuffle=True))
            except ValueError as error:
                assert "different x of rows with equal y" in str(error)
                print("refused")
    """
    assert hvdrun.python(2, script, status=0).stdout.count("refused") == 4


def test_ranks_whose_loaders_shuffle_the_same_rows_are_told(hvdrun) -> None:
    script = """
        import random, tempfile, torch
        from torch.utils.data import DataLoader, Dataset, get_worker_info

        tempfile.tempdir = "/tmp"  # the paths of sockets of workers must be short

        class Rows(Dataset):
            is_open = False
            def __len__(self):
                return 16
            def __getitem__(self, i):
                assert self.is_open or kind != "in workers"
                x, y = np.full(4, i + 16.0 * hvd.rank() * (kind == "parts")), i // 8
                noise = random.random() + np.random.rand() + torch.rand(4).numpy()
                drawn.append(states())
                if kind in ("augmented", "parts", "noise"):
                    x += noise
                return x, noise if kind == "noise" else y

        def open_file(worker):
            get_worker_info().dataset.is_open = True

        def states():
            numpy = np.random.get_state()[1].tolist()
            return random.getstate(), numpy, torch.get_rng_state().tolist()

        keras.utils.set_random_seed(hvd.rank())
        for kind in KINDS:
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4)), "mse")
            how = {"num_workers": 1, "worker_init_fn": open_file} if kind == "in workers" else {}
            loader = DataLoader(Rows(), 4, shuffle=True, generator=torch.Generator(), **how)
            loader.generator.manual_seed(hvd.rank())
            drawn, steps = [states()], 2 if kind == "steps" else None
            try:
                callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
                model.fit(loader, verbose=0, callbacks=callbacks, steps_per_epoch=steps)
            except ValueError as error:
                assert "all 2 ranks train on the same rows" in str(error)
                # Keras builds the model by a batch; what compares rows leaves no trace.
                assert states() == drawn[0 if how else 4]
                print("told of", kind)
    """
    told = ["shuffled", "augmented", "in workers"]
    script = script.replace("KINDS", str([*told, "parts", "noise", "steps"]))
    lines = hvdrun.python(2, script, status=0).stdout.splitlines()
    for rank in "01":
        of_rank = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
        assert of_rank == [f"told of {kind}" for kind in told]


def test_steps_and_layers_that_combine_or_add_up_rows_are_told(hvdrun) -> None:
    script = """
        import torch
        x = np.random.default_rng(hvd.rank()).normal(size=(16, 4)).astype("float32")

        class Layer(keras.layers.Layer):
            calls = 0
            def call(self, x):
                self.calls += x.device.type != "meta"
                return {
                    "first row": lambda: x - x[:1],
                    "loss of sum": lambda: self.add_loss(torch.sum(x**2)) or x,
                    "loss of part": lambda: self.add_loss(torch.sum(x**2) / 1000) or x,
                    "loss of mean": lambda: self.add_loss(torch.mean(x**2)) or x,
                    "layer that gathers": lambda: x - hvd.allreduce(torch.mean(x, 0)),
                }.get(kind, lambda: x)()

        class Own(keras.Model):
            seen = 0
            def train_step(self, data):
                x, y = data
                self.zero_grad()
                output = self(x, training=True)
                wrong = torch.mean((output - y) ** 2, 1)
                self.seen += 1
                loss = {
                    "step of sum": lambda: wrong.sum() + wrong.mean(),
                    "step of torch": lambda: torch.nn.functional.mse_loss(
                        self(x), y, reduction="sum"
                    ),
                    "step of mean": lambda: wrong.mean() + (self.weights[0] ** 2).sum(),
                    "step of quotient": lambda: 0.3 * wrong.sum() / 4,
                    "step of part": lambda: 0.3 * wrong.sum(),
                    "step of all": lambda: wrong.sum() / 8,
                    "step of mask": lambda: wrong.sum() / (wrong > 0).sum(),
                    "step of Keras": lambda: self.compute_loss(x, y, output),
                }[kind]()
                loss.backward()
                with torch.no_grad():
                    weights = self.trainable_weights
                    self.optimizer.apply([w.value.grad for w in weights], weights)
                return {"loss": loss.detach()}

        for kind in KINDS:
            inputs, layer = keras.Input([4]), Layer()
            hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(3)(layer(inputs)))
            made = Own if kind.startswith("step") else keras.Model
            model = made(inputs, keras.layers.BatchNormalization()(hidden))
            loss = keras.losses.MeanSquaredError(
                "sum" if kind == "step of Keras" else "sum_over_batch_size"
            )
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
            try:
                broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
                # Not all ranks can try it.
                rows = slice(13 if hvd.rank() and kind == "layer that gathers" else 16)
                steps = dict(epochs=1, verbose=0, callbacks=[broadcast], shuffle=False)
                model.fit(x[rows], x[rows, :3], batch_size=4, **steps)
            except ValueError as error:
                print(kind, "mixes" if "other than by a mean" in str(error) else "sums")
            else:
                calls = 4 if kind == "layer that gathers" else layer.calls  # Keras tries it, too
                assert calls == getattr(model, "seen", 4) == 4
    """
    told = {"first row": "mixes"}
    summed = "loss of sum", "loss of part", "step of sum", "step of torch"
    told |= dict.fromkeys((*summed, "step of part", "step of all"), "sums")
    kinds = [*told, "loss of mean", "layer that gathers", "step of mean", "step of quotient"]
    kinds += ["step of mask", "step of Keras"]
    hvdrun.environment["HVD_STRICT"] = "1"
    lines = hvdrun.python(2, script.replace("KINDS", str(kinds)), status=0).stdout.splitlines()
    for rank in "01":
        of_rank = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
        assert of_rank == [f"{kind} {how}" for kind, how in told.items()]


def test_callbacks_decide_alike(hvdrun) -> None:
    script = """
        import pathlib, torch
        r = hvd.rank()
        x = np.random.default_rng(r).normal(size=(32, 4)).astype("float32")
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)

        class Seen(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                self.losses, self.epochs = [], 0
            def on_train_batch_end(self, batch, logs=None):
                self.losses.append(logs["loss"])
            def on_epoch_end(self, epoch, logs=None):
                self.epochs += 1

        def fit(*callbacks, data=x, epochs=1):
            seen = Seen()
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), "mse")
            model.fit(data, data[:, :1], 8, epochs, callbacks=[broadcast, *callbacks, seen],
                      shuffle=False, verbose=0)
            return seen

        # The second batch of rank 1 is not finite.
        bad = x.copy()
        bad[9:10] = np.nan if r == 1 else 1
        mine = keras.callbacks.TerminateOnNaN() if r == 1 else Seen()
        for callback in (keras.callbacks.TerminateOnNaN(), mine):
            seen = fit(callback, data=bad)
            assert len(seen.losses) == 2, seen.losses
            assert np.isnan(seen.losses[1]) == (r == 1)
        # Each rank's loss would stop it elsewhere.
        stop = keras.callbacks.EarlyStopping("loss", patience=0, mode="max" if r else "min")
        assert len(set(hvd.allgather_object(fit(stop, epochs=6).epochs))) == 1

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = r == 1 and epoch == 1

        assert fit(Stop(), epochs=4).epochs == 2

        class Mine(keras.callbacks.CSVLogger):
            steps = 0
            def on_train_batch_end(self, batch, logs=None):
                self.steps += 1

        names = f"derived {r}.csv", f"plain {r}.csv"
        writers = [Mine(names[0]), keras.callbacks.CSVLogger(names[1])]
        writers.append(keras.callbacks.TensorBoard("board"))
        fit(keras.callbacks.CallbackList([]), *writers, hvd.callbacks.StatsLogger(f"stats {r}"))
        assert writers[0].steps == 4
        assert all(pathlib.Path(name).exists() == (r == 0) for name in (*names, f"stats {r}"))
        if r == 0:
            (events,) = pathlib.Path("stats 0/train").iterdir()
            assert b"hvd/rank_1/awaited_seconds" in events.read_bytes()

        class Flip(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if r == 2 and batch == 1:
                    bits = self.model.trainable_variables[0].value.detach().view(torch.int32)
                    bits[0, 0] ^= 1

        try:
            fit(Flip(), hvd.callbacks.VerifyWeights(2))
        except RuntimeError as error:
            text = str(error)
            assert "after batch 2 of epoch 1 the values of" in text, text
            assert "on rank 2 on " in text, text
        else:
            raise AssertionError
        fit(hvd.callbacks.VerifyWeights(1), hvd.callbacks.ProgressLogger())
        print("done")
    """
    output = hvdrun.python(3, script, status=0).stdout
    assert output.count("done") == 3
    assert "samples/s" in output


def test_an_overflow_on_one_rank_skips_the_step_on_all(hvdrun) -> None:
    hvdrun.environment["HVD_BUCKET_BYTES"] = "256"
    script = """
        rng = np.random.default_rng(hvd.rank())
        x = rng.normal(size=(48, 6)).astype("float32")
        if hvd.rank() == 1:
            x[16:24] *= 1e4  # the third step
        start = keras.initializers.GlorotUniform(seed=1)
        keras.config.set_dtype_policy("mixed_float16")
        layers = [keras.layers.Dense(n, kernel_initializer=start) for n in (16, 1)]
        model = keras.Sequential([keras.Input([6]), *layers])
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, 2.0**6, dynamic_growth_steps=2)
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        seen = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                scale, updates = float(optimizer.dynamic_scale), int(inner.iterations)
                values = [*model.weights, *inner.variables]
                digest = [float(np.abs(v.numpy()).sum(dtype="d")) for v in values]
                ahead = inner._hvd_reducer._ahead
                seen.append([scale, updates, digest, ahead is not None])

        model.fit(x, x[:, :1], 8, shuffle=False, callbacks=[Look()], verbose=0)
        theirs = hvd.allgather_object(seen)
        assert all(one == theirs[0] for one in theirs), theirs
        scales, updates, digests, ahead = zip(*seen)
        assert scales == (64, 128, 64, 64, 128, 128), scales
        assert updates == (1, 2, 2, 3, 4, 5), updates
        assert digests[1] == digests[2] != digests[3]
        assert np.isfinite(digests[-1]).all()
        assert all(ahead)  # buckets travel early after that, too
        print("done")
    """
    assert hvdrun.python(2, script, status=0).stdout.count("done") == 2
