"""Keras on PyTorch: N ranks are one process, and what is not there is refused."""

import importlib.util
import json
import pathlib
import re
import sys
import textwrap

import numpy as np
import pytest

from tests.harness.launcher import WITHOUT_HIDDEN
from tests.harness.ranks import python
from tests.programs import draw
from tests.programs import run as programs
from tests.unit.test_core import binaries as binaries
from tests.unit.test_core import fake_cuda as fake_cuda

TRAINING = pathlib.Path(__file__).parent / "training.py"
# Each rank's batches have statistics and random masks of their own: the ranks agree, and one
# process computes something else.
OWN = ("batch norm", "dropout")
CASES = ["sgd", "adam", "passes", "own step", "branch", "no branch", "sum", "circle", "masked sgd"]
CASES += [*OWN, "bfloat16", "float16", "sum by batch", "masked sgd by batch"]
CASES += ["loader", "workers", "sampler", "dataset"]
# Together nearly each value of each choice occurs.
PROGRAMS = (3556, 619, 7471, 144, 3329, 6842, 11098, 9091, 7717, 7158, 6381, 2936, 1011, 10515)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What training.py wrote on 1, 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("torch")
    for size in (1, 2, 3):
        command = ["-m", "hvd_keras.hvdrun", "-np", size, "--oversubscribe", sys.executable]
        python(*command, TRAINING, folder, KERAS_BACKEND="torch", status=0)
    return folder


def weights(folder, case, rank, size):
    with np.load(folder / f"{case} {rank} of {size}.npz") as file:
        return [file[name] for name in file.files]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process(trained, case, size) -> None:
    alone = weights(trained, case, 0, 1)
    ranks = [weights(trained, case, rank, size) for rank in range(size)]
    assert all(all(map(np.array_equal, theirs, ranks[0])) for theirs in ranks)
    if case in OWN:
        assert not all(map(np.allclose, alone, ranks[0]))
        return
    tolerance = 2e-2 if case in ("bfloat16", "float16") else 1e-5
    for one, several in zip(alone, ranks[0], strict=True):
        np.testing.assert_allclose(several, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 3])
def test_metrics_are_those_of_one_process(trained, size) -> None:
    alone = json.loads((trained / "logs 0 of 1.json").read_text())
    for rank in range(size):
        logs = json.loads((trained / f"logs {rank} of {size}.json").read_text())
        for case in ("sgd", "adam", "sum", "circle", "masked sgd"):
            metric = "mae" if case.startswith("masked") else "auc"
            names = {"loss", metric, "val_loss", f"val_{metric}"}
            assert logs[case].keys() == alone[case].keys() == names
            for key, values in logs[case].items():
                np.testing.assert_allclose(values, alone[case][key], rtol=1e-3)


def test_random_programs(monkeypatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    specs = {str(seed): draw.legal(draw.draw(seed), draw.TORCH) for seed in PROGRAMS}
    assert programs.run(specs, (2, 3)) == ({}, {})


def test_collectives_and_their_gradients(hvdrun) -> None:
    script = """
        import torch
        r = hvd.rank()
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            x = torch.tensor([1.0 + r, 2.0], dtype=dtype, requires_grad=True)
            y = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)
            assert y.dtype == dtype and y.tolist() == [6.0, 8.0], y
            (y * (1 + r)).sum().backward()
            assert x.grad.tolist() == [6.0, 6.0], x.grad  # 2 * (1 + 2)
            assert hvd.allreduce(x).tolist() == [1.5, 2.0]
        assert hvd.allreduce(torch.tensor([r, 5]), op=hvd.Max).tolist() == [1, 5]
        assert hvd.allreduce(torch.tensor([r == 0, True]), op=hvd.Min).tolist() == [False, True]
        assert hvd.allreduce(np.float32([3, r]), op=hvd.Sum).tolist() == [6, 1]
        strided = torch.arange(6.0).reshape(2, 3).T
        assert torch.equal(hvd.allreduce(strided * (1 + r), op=hvd.Sum), strided * 3)
        x = torch.full((r + 1, 2), 10.0 + r, requires_grad=True)
        y = hvd.allgather(x)
        assert y[:, 0].tolist() == [10, 11, 11]
        (y * torch.arange(3.0)[:, None] * (1 + r)).sum().backward()
        assert x.grad[:, 0].tolist() == [[0.0], [3.0, 6.0]][r]
        x = torch.tensor([5.0 + r], dtype=torch.bfloat16, requires_grad=True)
        y = hvd.broadcast(x, root_rank=1)
        assert y.item() == 6
        (y * (1 + r)).sum().backward()
        assert x.grad.item() == [0, 3][r]
        x = torch.arange(3.0, requires_grad=True)
        y, counts = hvd.alltoall(x, splits=[1, 2] if r == 0 else [3, 0])
        assert counts.tolist() == [[1, 3], [2, 0]][r]
        assert y.tolist() == [[0, 0, 1, 2], [1, 2]][r]
        (y * (1 + r)).sum().backward()
        assert x.grad.tolist() == [[1, 2, 2], [1, 1, 1]][r], x.grad
        thirds, half = torch.full((2,), (1 + r) / 3), hvd.Compression.fp16
        for call, op, value in (hvd.reducescatter, hvd.Sum, 1), (hvd.allreduce, hvd.Adasum, 0.5):
            got = call(thirds, op=op, compression=half)
            assert got.dtype == torch.float32 and (got - value).abs().max() < 1e-3, got
        x = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
        y = hvd.reducescatter(x * (1 + r))
        assert y.flatten().tolist() == [[1.5, 3], [4.5]][r]
        (y * (1 + r)).sum().backward()
        assert x.grad.flatten().tolist() == [v * (1 + r) for v in (0.5, 0.5, 1)]

        # Second derivatives: of the ranks' losses together, by the tensors of all.
        def twice(loss, of):
            first = torch.autograd.grad(loss, of, create_graph=True, allow_unused=True)
            penalty = sum((g ** 2).sum() for g in first if g is not None)
            found = torch.autograd.grad(penalty, of, allow_unused=True)
            return [torch.zeros(2, 2) if g is None else g for g in found]

        def of_rank(k):
            return torch.tensor([[1.0 + k, 2.0], [3.0, 4.0 - k]], requires_grad=True)

        for call, result in (
            (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda a, b: [a + b, a + b]),
            (hvd.allgather, lambda a, b: [torch.cat([a, b])] * 2),
            (lambda x: hvd.broadcast(x, 1), lambda a, b: [b, b]),
            (hvd.alltoall, lambda a, b: [torch.cat([a[k : k + 1], b[k : k + 1]]) for k in (0, 1)]),
            (hvd.reducescatter, lambda a, b: [(a + b)[:1] / 2, (a + b)[1:] / 2]),
        ):
            mine, together = of_rank(r), [of_rank(0), of_rank(1)]
            (got,) = twice((call(mine) ** 3).sum(), [mine])
            expected = twice(sum((part ** 3).sum() for part in result(*together)), together)
            torch.testing.assert_close(got, expected[r])
        assert hvd.allgather_object({"r": r}) == [{"r": 0}, {"r": 1}]
        assert hvd.broadcast_object(r, 1) == 1
        hvd.barrier()

        def error(call):
            try:
                call()
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        text = error(lambda: hvd.allreduce(torch.zeros(2 + r)))
        assert "FailedPreconditionError" in text and "[2]" in text and "[3]" in text, text
        bad = torch.zeros(2, device="meta") if r else torch.zeros(2)
        text = error(lambda: hvd.allreduce(bad))
        assert "FailedPreconditionError" in text and "got a tensor on meta" in text, text
        text = error(lambda: hvd.allreduce(torch.zeros(2, dtype=torch.complex64)))
        assert "TypeError: hvd.allreduce: got a tensor of dtype complex64" in text, text
        text = error(lambda: hvd.allreduce(torch.zeros(2, dtype=torch.int64)))
        assert "ValueError" in text and "would be rounded" in text, text
        text = error(lambda: hvd.alltoall(torch.zeros(3), splits=[1.5, 1.5] if r else [1, 2]))
        assert "FailedPrecond" in text and "[1.5, 1.5], expected integers" in text, text
        print("done")
    """
    assert hvdrun.python(2, script, status=0).stdout.count("done") == 2


def test_the_example_and_its_file_are_for_both_backends(hvdrun) -> None:
    example = TRAINING.parents[2] / "examples" / "keras_mnist.py"
    # Else torch leaves an empty folder among the temporary files.
    hvdrun.environment["TORCHINDUCTOR_CACHE_DIR"] = str(hvdrun.folder / "inductor")
    (hvdrun.folder / "hidden").mkdir()
    (hvdrun.folder / "hidden" / "sitecustomize.py").write_text(WITHOUT_HIDDEN)
    without = {**hvdrun.environment, "PYTHONPATH": str(hvdrun.folder / "hidden")}
    without["HIDDEN"] = "tensorflow"
    on_two = ("-np", "2", "--oversubscribe")
    job = hvdrun.run(*on_two, "--check", env=without)
    assert re.search("PyTorch: .*collectives of 6 kinds on 2 ranks", job.stdout, re.DOTALL), job
    job = hvdrun.run(*on_two, sys.executable, str(example), "--epochs", "4", env=without, status=0)
    assert float(re.search(r"Test accuracy: ([0-9.]+)", job.stdout)[1]) > 0.6
    rates = [float(rate) for rate in re.findall(r" lr: ([0-9.e-]+)", job.stdout)]
    np.testing.assert_allclose(rates, [0.00133, 0.00167, 0.002, 0.002], atol=1e-4)
    sums = set()
    # The optimizer's class is one of Keras's torch; the rest needs no torch on TensorFlow.
    (hvdrun.folder / "alone").mkdir()
    (hvdrun.folder / "alone" / "torch.py").write_text("raise ImportError")
    paths = {"torch": "", "tensorflow": str(hvdrun.folder / "alone")}
    for backend in ("torch", "tensorflow"):
        script = (
            "import keras, numpy as np; path = 'checkpoints/mnist.keras';"
            "model = keras.models.load_model(path, compile=False);"
            "print('sum', sum(float(np.abs(v.numpy()).sum(dtype='d')) for v in model.weights))"
        )
        env = {"KERAS_BACKEND": backend, "PYTHONPATH": paths[backend]}
        loaded = python("-c", script, cwd=hvdrun.folder, **{**hvdrun.environment, **env})
        sums.add(re.search(r"sum [0-9.]+", loaded.stdout)[0])
    assert len(sums) == 1


def test_run_starts_ranks_from_a_notebook(hvdrun) -> None:
    script = """
        def work(first):
            import torch
            import hvd_keras as hvd
            hvd.init()
            return hvd.rank(), hvd.allreduce(torch.tensor([first + hvd.rank()]), op=hvd.Sum).item()

        import hvd_keras as hvd
        print(hvd.run(work, (3,), np=2, options=["--oversubscribe"]))
    """
    told = python("-c", textwrap.dedent(script), **hvdrun.environment, status=0).stdout
    assert "[(0, 7), (1, 7)]" in told


def test_tensors_on_the_fakes_of_gpus(hvdrun, fake_cuda) -> None:
    torch = pathlib.Path(importlib.util.find_spec("torch").origin)
    if not re.search(r"^cuda.*'13\.", torch.with_name("version.py").read_text(), re.MULTILINE):
        pytest.skip("this PyTorch has no CUDA 13")
    driver = hvdrun.folder / "libcuda.so.1"  # PyTorch opens it by this name
    driver.symlink_to(fake_cuda["HVD_CUDART_LIBRARY"])
    hvdrun.environment |= {**fake_cuda, "HVD_BUCKET_BYTES": "4096"}
    hvdrun.environment["KERAS_TORCH_DEVICE"] = "cpu"  # of what is computed
    del hvdrun.environment["CUDA_VISIBLE_DEVICES"]
    fakes = [f"LD_LIBRARY_PATH={hvdrun.folder}", f"LD_PRELOAD={driver}"]
    program = [sys.executable, str(TRAINING.with_name("gpu.py"))]
    job = hvdrun.run("-np", "2", "--oversubscribe", "env", *fakes, *program, status=0)
    assert job.stdout.count("ok  what_differs_is_refused") == 2


def test_what_is_not_there_is_refused(hvdrun) -> None:
    script = """
        import torch
        x = np.arange(64.0).reshape(16, 4) * (1 + hvd.rank())
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callbacks = keras.callbacks

        def model(optimizer=None, **options):
            one = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            optimizer = optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4))
            one.compile(optimizer, options.pop("loss", "mse"), **options)
            return one

        def fit(*more, rows=16, **options):
            model(**options).fit(
                x[:rows], x[:rows, :1], batch_size=4, callbacks=[broadcast, *more], verbose=0
            )

        def refused(kind, text, call):
            try:
                call()
            except kind as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"{text} was not raised")

        refused(ValueError, "different numbers of batches", lambda: fit(rows=8 + 8 * hvd.rank()))
        needs, backup = NotImplementedError, callbacks.BackupAndRestore("x")
        refused(ValueError, "Use hvd.callbacks.Checkpoint('x')", lambda: fit(backup))
        loss = keras.losses.MeanSquaredError(reduction="none")
        refused(needs, "reduction", lambda: fit(loss=loss))
        wrap, sgd = hvd.DistributedOptimizer, keras.optimizers.SGD
        refused(needs, "shard_state", lambda: wrap(sgd(), shard_state=True))
        refused(needs, "fragmets", lambda: wrap(sgd(), fragments=1, groups=None, fragmets=None))
        refused(TypeError, "torch.optim", lambda: wrap(torch.optim.SGD([torch.zeros(1)])))
        refused(ValueError, "distributed already", lambda: wrap(wrap(sgd())))
        several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd()))
        refused(ValueError, "cannot add up", lambda: wrap(several, backward_passes_per_step=2))
        names = ("layers", "DistributedGradientTape", "SyncBatchNormalization", "join", "spark")
        for name in (*names, "load_model", "auto", "PartialDistributedOptimizer"):
            refused(needs, f"hvd.{name} needs Keras on TensorFlow", lambda: getattr(hvd, name))
        rate = 1e-4 * (1 + hvd.rank())
        refused(
            ValueError,
            "The ranks train different models",
            lambda: fit(optimizer=wrap(sgd(rate, momentum=0.5 * hvd.rank()))),
        )

        class Skipping(keras.Model):
            steps = 0

            def train_step(self, data):
                y = self.compute_loss(y=data[1], y_pred=self(data[0]))
                self.zero_grad()
                y.backward()
                self.steps += 1
                if self.steps != 2 + hvd.rank():
                    gradients = [v.value.grad for v in self.trainable_weights]
                    self.optimizer.apply(gradients, self.trainable_weights)
                return {"loss": y.detach()}

        skipping = Skipping((like := model()).inputs, like.outputs)
        skipping.compile(wrap(sgd(1e-4)), "mse")
        fits = lambda: skipping.fit(x, x[:, :1], 4, verbose=0, callbacks=[broadcast])
        refused(ValueError, "the ranks skip different steps", fits)
        different = (x, x[:, :1])
        refused(ValueError, "differ", lambda: hvd.data.shard(different, batch_size=4))
        shard, loading = hvd.data.shard, torch.utils.data
        refused(needs, "map-style", lambda: shard(iter([]), batch_size=4))
        refused(ValueError, "needs y", lambda: shard((x * 0,), batch_size=4, uneven="pad"))
        few = lambda: shard((x * 0, x * 0), batch_size=16, uneven="trim")
        refused(ValueError, "do not make whole steps", few)
        rows = loading.TensorDataset(torch.zeros(8, 4))
        refused(ValueError, "expected none", lambda: shard(loading.DataLoader(rows), batch_size=4))
        loader = loading.DataLoader(rows, 2, sampler=loading.DistributedSampler(rows, 2, 0))
        refused(ValueError, "DistributedSampler", lambda: shard(loader))
        numbers = loading.DataLoader(rows, batch_sampler=[[0, 1], [2]])
        refused(needs, "batch_sampler", lambda: shard(numbers))

        class Random(loading.Sampler):
            def __len__(self):
                return 8

            def __iter__(self):
                return iter(np.random.permutation(8).tolist())

        loader = loading.DataLoader(rows, 2, sampler=Random())
        refused(ValueError, "gives other rows each time", lambda: shard(loader))
        parameters = torch.nn.Linear(2, 2).parameters()
        share = hvd.broadcast_variables
        refused(TypeError, "got a Parameter, expected variables", lambda: share(parameters, 0))
        share(model().weights[0], 0)
        layers = [keras.layers.Dense(4, name=name) for name in "ab"[:: 1 - 2 * hvd.rank()]]
        swapped = keras.Sequential([keras.Input((4,)), *layers]).weights
        refused(ValueError, "a/kernel float32", lambda: share(swapped, 0))
        if hvd.rank() == 0:
            keras.layers.Dense(1)  # Keras counts it in the names of the optimizer's variables
        fit(optimizer=wrap(keras.optimizers.Adam()))
        print("done")
    """
    assert hvdrun.python(2, script, status=0).stdout.count("done") == 2


def test_buckets_travel_during_backward_with_the_same_bits(hvdrun) -> None:
    hvdrun.environment["HVD_BUCKET_BYTES"] = "4096"
    script = """
        import sys, torch
        from hvd_keras.torch import optimizer as ours
        x = np.random.default_rng(hvd.rank()).normal(size=(64, 40)).astype("float32")
        plain, ahead = ours.Ahead, []

        class Never(ours.Ahead):
            def _see(self, *_):
                pass

        class Changing(keras.Model):
            kind = "ahead"

            def look(self):
                sent = self.optimizer._hvd_reducer._ahead
                ahead.append(len(sent.sent) / len(sent._buckets) if sent else -1)
                assert sent is None or len(sent._buckets) > 3

            def train_step(self, data):
                weights, optimizer = self.trainable_weights, self.optimizer
                if self.kind == "own backward first":
                    self.compute_loss(y=data[1], y_pred=self(data[0])).backward()
                if self.kind in kinds[:2]:
                    apply = optimizer.apply
                    optimizer.apply = lambda *args: (self.look(), apply(*args))
                    logs = super().train_step(data)
                    optimizer.apply = apply
                    return logs
                # In an own step nothing travels so early, unless the test lets it.
                optimizer._hvd_reducer.is_stepping = self.kind != "in data"
                self.zero_grad()
                if self.kind == "left out" and ahead:  # after rank 0 has sent it
                    weights[0].value.requires_grad_(hvd.rank() == 0)
                y = self.compute_loss(y=data[1], y_pred=self(data[0]))
                if "apart" in self.kind:
                    values = [v.value for v in weights]
                    torch.autograd.grad(y, values, retain_graph=True)  # for a log
                    gradients = torch.autograd.grad(y, inputs=values)
                    if "other" in self.kind:
                        gradients = [0.5 * g for g in gradients]
                    self.optimizer.apply(gradients, weights)
                    return {"loss": y.detach()}
                y.backward(retain_graph=True)
                self.look()
                if self.kind == "again":  # gradients become twice as large after they were sent
                    y.backward()
                gradients = [v.value.grad for v in weights]
                if self.kind == "in place" and hvd.rank() == 1:
                    gradients[0].mul_(2)
                if self.kind == "in data":
                    gradients[0].data.mul_(1 + hvd.rank())
                if self.kind == "left out" and len(ahead) == 2:
                    gradients[0] = None
                if self.kind == "other":
                    gradients = [g + 1 for g in gradients]
                self.optimizer.apply(gradients, weights)
                return {"loss": y.detach()}

        def trained(kind, cls=plain, local_steps=None):
            ours.Ahead = cls
            start = keras.initializers.GlorotUniform(seed=1)
            inputs = keras.Input([40])
            y = inputs
            for _ in range(5):
                y = keras.layers.Dense(40, "tanh", kernel_initializer=start)(y)
            model = Changing(inputs, y)
            model.kind = kind
            how = {"momentum": 0.9, "gradient_accumulation_steps": local_steps}
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, **how)), "mse")
            ahead.clear()
            for _ in range(4):
                model.train_on_batch(x, x)
            return [v.numpy() for v in model.weights], list(ahead)

        kinds = ["Keras's step", "own backward first", "ahead", "again", "in place", "in data"]
        kinds += ["left out", "other"]
        for kind in kinds:
            one, sent = trained(kind)
            two, none = trained(kind, Never)
            assert all(map(np.array_equal, one, two)), kind
            assert max(none) <= 0, none
            # All buckets but in the first step; and not again, if they were in vain.
            if kind == "left out" and hvd.rank() == 1:
                assert 0 < sent[1] < 1
                sent[1] = 1
            expected = [-1, 1, -1, -1] if kinds.index(kind) > 2 else [-1, 1, 1, 1]
            assert sent == ([-1, 0, 0, 0] if kind == "in data" else expected), (kind, sent)
            hvd.barrier()
            print("end of", kind, file=sys.stderr, flush=True)
        for kind in ("ahead", "other", "apart", "other, apart"):
            steps = None if "apart" in kind else 2
            trained(kind, local_steps=steps)
            assert max(ahead, default=0) == 0, ahead  # what an optimizer accumulates is not sent
            hvd.barrier()
            print("end of last", kind, file=sys.stderr, flush=True)
    """
    job = hvdrun.python(2, script, status=0)
    before, _, after = job.stderr.partition("end of again")
    warning = "gradients are changed before the mean over the ranks is taken"
    assert warning not in before
    assert warning in after
    assert job.stderr.count("end of other") == 2
    lines = after.rpartition("end of other\n")[2].splitlines()
    told = [line for line in lines if warning in line or "end of last" in line]
    found = [warning in told[0], warning in told[2], warning in told[5], warning in told[7]]
    assert found == [False, True, False, True], told
