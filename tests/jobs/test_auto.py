"""``hvdrun --auto``: the results of one process, and errors for what cannot have them."""

import contextlib
import dataclasses
import json
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys

import pytest

from tests.harness.launcher import LIMIT, Launcher

CASES = pathlib.Path(__file__).parents[1] / "scripts" / "auto_cases.py"

# Each line is an error on all ranks, which names what to change.
REFUSALS = """
import keras, numpy as np, tensorflow as tf
import hvd_keras as hvd
x = np.ones((8, 2), "float32")
def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made
def own_loop():
    optimizer, net = keras.optimizers.SGD(0.1), model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x))
    weights = net.trainable_weights
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
def differs():
    rows = np.full((8, 2), __import__("os").getpid(), "float32")
    model().fit(rows, x[:, :1], verbose=0)
def order_differs():
    rows = np.arange(8)[np.argsort([hash((i, __import__("os").getpid())) for i in range(8)])]
    model().fit(np.eye(8)[rows][:, :2].astype("float32"), x[:, :1], verbose=0)
def model_parallel():
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2,), ["model"]))
    keras.distribution.ModelParallel(layout_map=layout)
def too_few():
    keras.distribution.DataParallel(devices=["cpu:0"])
def too_many():
    keras.distribution.initialize(num_processes=8)
def endless():
    rows = [(x.copy(), x[:, 0].copy()) for number in range(3)]
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    net.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    def cycle(rows):
        while True:
            yield from rows
    options = {"steps_per_epoch": 3, "validation_steps": 2, "epochs": 4, "verbose": 0}
    net.fit(cycle(rows), validation_data=cycle(rows), **options)
    assert all((part == 1).all() for pair in rows for part in pair)
def prepare():
    dropout = keras.layers.Dropout(0.5, seed=3)
    net = keras.Sequential([keras.Input((2,)), dropout, keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    net.set_weights([np.full(w.shape, 0.1 + hvd.rank(), w.dtype) for w in net.get_weights()])
    hvd.prepare(net).fit(x, x[:, :1], verbose=0)
    both = hvd.allgather(net.get_weights()[0].reshape(1, -1)).numpy()
    assert both.shape == (2, 2) and (both[0] == both[1]).all() and (both < 1).all(), both
    seeds = hvd.allgather(tf.cast(dropout.seed_generator.state[None], tf.int64)).numpy()
    assert (seeds[0] == seeds[1]).all(), seeds
def parallel():
    data = tf.data.Dataset.range(400).map(
        lambda i: (tf.random.normal([2]) * tf.cast(i, tf.float32), tf.random.uniform([1])),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    model().fit(data.batch(50), verbose=0)
def weights():
    net, other = model(), model()
    for one in net, other:
        one.set_weights([w + hvd.rank() for w in one.get_weights()])
        assert np.allclose(one.predict(x, verbose=0), one(x))
    other.save_weights("first.weights.h5")
    net.load_weights("first.weights.h5")
    assert np.allclose(net.predict(x, verbose=0), other(x))
def strategy():
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        model().fit(x, x[:, :1], verbose=0)
def lengths():
    specs = [tf.TensorSpec([None, n], tf.float32) for n in (2, 1)]
    parts = tf.data.Dataset.from_generator(lambda: [(x, x[:6, :1])], output_signature=tuple(specs))
    model().fit(parts, verbose=0)
def predicts():
    first = keras.layers.Lambda(lambda x: x[:1])
    keras.Sequential([keras.Input((2,)), first]).predict(x, verbose=0)
for case in (
    *(model_parallel, too_few, too_many, lengths, predicts),
    *(own_loop, differs, order_differs, strategy, endless, prepare, parallel, weights, hvd.init),
    tf.compat.v1.disable_eager_execution,
):
    try:
        case()
        print(case.__name__, "went on")
    except Exception as error:
        print(case.__name__, type(error).__name__, " ".join(str(error).split()))
"""

TOLD = {
    "own_loop": "trains otherwise: by SGD.apply_gradients in a loop",
    "differs": "the ranks have different data",
    "order_differs": "the ranks have different data",
    "endless": "went on",
    "prepare": "went on",
    "parallel": "went on",
    "weights": "went on",
    "strategy": "a MirroredStrategy is in force",
    "model_parallel": "Use keras.distribution.DataParallel()",
    "lengths": "the parts of a batch have different numbers of rows",
    "predicts": "predict returns another number of rows than its part of a batch has",
    "too_few": "got 1 as number of devices, expected those of all 2 ranks",
    "too_many": "got num_processes=8",
    "init": "this one calls hvd.init(). Leave out --auto",
    "disable_eager_execution": "in graphs of TensorFlow 1 (disable_eager_execution)",
}


@pytest.fixture
def launcher(tmp_path: pathlib.Path) -> Launcher:
    return Launcher(tmp_path)


def auto(
    launcher: Launcher, size: int, *command: str, **options
) -> subprocess.CompletedProcess[str]:
    job = ("--auto", "--no-prefix", "-np", str(size), "--oversubscribe", *command)
    return launcher.run(*job, **options)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)]


@dataclasses.dataclass
class Both:
    """A script of one process, and what it printed there and by --auto."""

    folder: pathlib.Path
    alone: subprocess.CompletedProcess[str]
    together: subprocess.CompletedProcess[str]


DIVIDED = ["arrays", "losses", "custom"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, [*DIVIDED, "whole", "files"]), id="2 ranks"),
        pytest.param(
            (3, [*DIVIDED, "sources", "whole", "more", "files"]),
            id="3 ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def both(request, tmp_path_factory) -> Both:
    """The cases in one process and in one job."""
    size, cases = request.param
    launcher = Launcher(tmp_path_factory.mktemp("cases"))
    command, folder = [sys.executable, str(CASES), *cases], launcher.folder / "alone"
    folder.mkdir()
    alone = subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT
    )
    together = auto(launcher, size, *command, timeout=2 * LIMIT)
    assert together.returncode == 0, together.stderr
    return Both(launcher.folder, alone, together)


def left(folder: pathlib.Path) -> set[str]:
    """The files that a script has left, but those of this test."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    names = {path for path in paths if not path.startswith(("alone", "rows-", "temporary"))}
    return {re.sub(r"tfevents\..*", "tfevents", name) for name in names}


def test_results_are_those_of_one_process(both: Both) -> None:
    words, other = (re.sub(r"-?[\d.]+", "", job.stdout) for job in (both.together, both.alone))
    assert words == other
    expected = pytest.approx(numbers(both.alone.stdout), rel=2e-3, abs=2e-3)
    assert numbers(both.together.stdout) == expected

    def divided(path: pathlib.Path) -> int:
        return sum(count for name, count in json.loads(path.read_text()) if name in DIVIDED)

    total = divided(next(both.folder.glob("alone/rows-*")))
    # Each has computed its rows, and the first steps of models with layers of its own once more.
    rows = [divided(path) for path in both.folder.glob("rows-*")]
    assert len(rows) == (3 if "sources" in both.together.args else 2)
    assert sum(rows) >= total
    assert max(rows) < 0.9 * total


def test_what_cannot_be_divided_is_computed_whole(both: Both) -> None:
    told = re.findall(r"does not divide the \w+ of model '\w+', as (.*)", both.together.stderr)
    reasons = (
        *("its gradient is not the mean over the rows of the batch", "its change of variable"),
        *("its result is not", "it fails with a part"),
        *("run_eagerly=True", "layer 'stateful' is stateful", "cannot divide random_shuffle"),
        "have parts of the shapes",
    )
    assert [text for text in reasons if not any(text in line for line in told)] == []
    assert all("Every rank computes all rows, with equal results" in line for line in told)


def test_files_are_those_of_one_process(both: Both) -> None:
    assert left(both.folder) == left(both.folder / "alone")
    assert "results/moved.weights.h5" in left(both.folder)
    assert both.together.stdout.count("interrupted") == 1
    assert both.together.stderr.count("to stderr") == 1
    assert (both.folder / "results" / "lines").read_text() == "line\n"
    with contextlib.closing(sqlite3.connect(both.folder / "results" / "rows.db")) as data:
        assert data.execute("SELECT COUNT(*) FROM rows").fetchall() == [(100,)]
    (events,) = (both.folder / "results" / "logs").iterdir()
    assert events.stat().st_size > 40
    assert json.loads((both.folder / "results" / "state.json").read_text()) == list(range(9))


def test_what_is_refused(launcher: Launcher) -> None:
    job = auto(launcher, 2, launcher.script(REFUSALS))
    assert job.returncode == 0, job.stderr
    told = dict(line.split(" ", 1) for line in job.stdout.splitlines())
    assert told.keys() == TOLD.keys()
    assert not [(name, text) for name, text in told.items() if TOLD[name] not in text]


@pytest.mark.slow
def test_a_job_that_exchanges_no_gradient_fails(launcher: Launcher) -> None:
    script = """
    import tensorflow as tf
    w = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = w * w
    w.assign_sub(0.1 * tape.gradient(loss, w))
    print("trained")
    """
    job = auto(launcher, 2, launcher.script(script))
    assert job.returncode == 1, job.stderr
    assert job.stdout == "trained\n"
    assert "trains otherwise: by tf.GradientTape.gradient in a loop" in job.stderr


@pytest.mark.slow
def test_module_arguments_and_command(launcher: Launcher) -> None:
    launcher.script("import sys; print(sys.argv[1:], __name__)", "told.py")
    assert auto(launcher, 2, "-m", "told", "a", "--b").stdout == "['a', '--b'] __main__\n"
    options = ["-u", "-W", "ignore"]
    assert auto(launcher, 2, sys.executable, *options, "told.py", "a").stdout == "['a'] __main__\n"
    (launcher.folder / "folder").mkdir()
    launcher.script("import sys; print(sys.argv[1:], __name__, sys.path[:1])", "folder/__main__.py")
    job = auto(launcher, 2, sys.executable, "folder", "a")
    assert job.stdout == f"['a'] __main__ ['{launcher.folder}/folder']\n", job.stderr
    job = auto(launcher, 2, "ls")
    assert job.returncode == 2
    assert "expected a Python script or -m module" in job.stderr
    launcher.script("import hvd_keras as hvd\nhvd.init()", "calls.py")
    job = auto(launcher, 2, "calls.py")
    assert job.returncode == 1
    assert re.search(
        r'^File ".*calls.py", line \d+, hvd.init\(\)\nRuntimeError: hvdrun --auto is', job.stderr
    )
    assert "Traceback" not in job.stderr
    environment = launcher.environment | {"TF_USE_LEGACY_KERAS": "1"}
    job = launcher.run("--auto", "-np", "2", "--oversubscribe", "told.py", env=environment)
    assert job.returncode == 1
    assert "hvdrun --auto needs Keras 3, and TF_USE_LEGACY_KERAS is set" in job.stderr
    job = auto(launcher, 2, "--horovod", "told.py")
    assert job.returncode == 2
    assert "got --auto and --horovod; expected one of them" in job.stderr
    launcher.script("from tensorflow.random import normal as n; import hvd_keras; hvd_keras.auto()")
    job = launcher.run("-np", "2", "--oversubscribe", "script.py")
    assert job.returncode == 1
    assert "normal, which the script has imported as n. Call hvd.auto() before" in job.stderr
    launcher.script("import warnings; warnings.warn('odd'); open('made', 'x')", "makes.py")
    job = auto(launcher, 2, "makes.py")
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("UserWarning: odd") == 1


GENERATORS = """
import random, sys, keras, numpy as np
keras.utils.set_random_seed(1)
net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
net.compile("sgd", "mse")
def batches(count, source):
    for _ in range(count):
        x = np.full((4, 2), source())
        yield x, x[:, :1]
def fit(batches, **options):
    net.fit(batches, steps_per_epoch=3, verbose=0, **options)
case = sys.argv[1]
if case == "then":
    own = np.random.default_rng(1)
    fit(batches(9, own.random))
    np.random.rand()
    net.fit(batches(3, np.random.rand), verbose=0)  # to its end
    fit(batches(9, np.random.rand))
    print("all silent", file=sys.stderr, flush=True)
    np.random.rand()
elif case == "two":
    fit(batches(9, random.random), validation_data=batches(9, random.random), validation_steps=2)
else:
    data = batches(99, lambda: 0.5)
    fit(data)
    fit(data)
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("then", "it is not alone in drawing from np.random"),
        pytest.param("two", "it is not alone in drawing from random", marks=pytest.mark.slow),
        pytest.param("again", "it is read again", marks=pytest.mark.slow),
    ],
)
def test_generators_that_differ_alone(launcher: Launcher, case: str, told: str) -> None:
    job = auto(launcher, 2, launcher.script(GENERATORS), case)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("one process reads ahead of a generator") == 1
    assert told in job.stderr
    if case == "then":
        assert job.stderr.index("all silent") < job.stderr.index("one process reads ahead")


RESTARTED = """
import os, keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.rand(20, 3)
class Killed(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3 and not os.path.exists("killed"):
            os.close(os.open("killed", os.O_CREAT))
            os.kill(os.getpid(), 9)
net = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
net.compile("adam", "mse")
callbacks = [keras.callbacks.BackupAndRestore("backup"), Killed()]
net.fit(x, x.sum(1), batch_size=6, epochs=6, shuffle=False, verbose=0, callbacks=callbacks)
print(*(float(abs(w).sum()) for w in net.get_weights()))
"""


@pytest.mark.slow
def test_a_restarted_job_ends_as_one_process_does(launcher: Launcher) -> None:
    path, folder = launcher.folder / "restarted.py", launcher.folder / "alone"
    path.write_text(RESTARTED)
    folder.mkdir()
    command = [sys.executable, str(path)]
    # Keras restores other masks for dropout than an undisturbed training has.
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": 180}
    assert subprocess.run(command, **options).returncode == -signal.SIGKILL
    alone = subprocess.run(command, **options)
    job = auto(launcher, 2, "--max-restarts", "1", *command)
    assert job.returncode == 0, job.stderr
    assert numbers(job.stdout) == pytest.approx(numbers(alone.stdout), rel=1e-4)


SCALED = """
import os, keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
x = random.normal(size=(50, 6)).astype("float32")
y = x[:, :1] * x[:, 1:2]
is_one = "HVDRUN_JOB" not in os.environ
class Warmup(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_begin(self, batch, logs=None):
        if self.epoch == 0:  # a tenth of 12 epochs
            self.model.optimizer.learning_rate = 0.02 * (1 + (batch + 1) / 4) / 2
def model(optimizer):
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.layers.Dense(9, "tanh"), keras.layers.Dense(1)])
    net.compile(optimizer(0.02 if is_one else 0.01), "mse")
    return net
def show(net, history):
    print(float(net.optimizer.learning_rate), *(float(abs(w).sum()) for w in net.get_weights()))
    print(*history["loss"], *history.get("val_loss", ()))
def fit(net, data, **options):
    if isinstance(data, tf.data.Dataset):
        data = data.batch(16 if is_one else 8)
        return net.fit(data, verbose=0, **options)
    return net.fit(*data, batch_size=16 if is_one else 8, verbose=0, **options)
rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=3)
for optimizer, data in (keras.optimizers.SGD, (x, y)), (keras.optimizers.Adam, rows):
    net, warmup = model(optimizer), [Warmup()] * is_one
    show(net, fit(net, data, epochs=12, callbacks=warmup, validation_data=(x, y)).history)
    show(net, fit(net, data).history)  # goes on with the rate that is scaled
    net.optimizer.learning_rate = 0.01 if is_one else 0.005
    show(net, fit(net, data, initial_epoch=2, epochs=3).history)
if is_one:
    raise SystemExit
class Batches(keras.utils.PyDataset):
    pass
fits = keras.Sequential([keras.layers.Dense(1)])
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.9)
def refused(call, rate=0.1):
    fits.compile(keras.optimizers.SGD(rate), "mse")
    try:
        call()
        print("went on")
    except ValueError as error:
        print(error)
refused(lambda: fits.fit(Batches()))
refused(lambda: fits.fit(x, y), schedule)
refused(lambda: fits.fit(x, y, callbacks=keras.callbacks.LearningRateScheduler(print)))
refused(lambda: fits.train_on_batch(x, y))
"""


def test_larger_batches_have_a_larger_rate(launcher: Launcher) -> None:
    (launcher.folder / "scaled.py").write_text(SCALED)
    script = str(launcher.folder / "scaled.py")
    alone = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True, timeout=LIMIT
    )
    job = auto(launcher, 2, "--scale-batch", script)
    assert job.returncode == 0, job.stderr
    told = [line for line in job.stdout.splitlines() if line.startswith("hvdrun --auto")]
    results = job.stdout.partition("got data")[0]
    results = re.sub("(?m)^hvdrun.*$", "", results)
    assert numbers(results) == pytest.approx(numbers(alone.stdout), rel=2e-3, abs=2e-4)
    assert len(numbers(results)) > 80
    rows = "hvdrun --auto --scale-batch: batches of 8 rows become batches of 16; the learning rate "
    assert told[:3] == [
        f"{rows}0.01 becomes 0.02, after a warm-up of 1 epoch",
        f"{rows}stays 0.02, with which the optimizer has trained before",
        f"{rows}0.005 becomes 0.01, without a warm-up, as initial_epoch is not 0",
    ]
    assert "2 batches of the dataset become one; the learning rate" in told[3]
    refusals = [
        "of type Batches",
        "rate is a schedule",
        "a LearningRateScheduler",
        "train_on_batch",
    ]
    assert [
        text for text, line in zip(refusals, told[-4:], strict=True) if text in line
    ] == refusals
    refused = launcher.run("--scale-batch", "-np", "2", script)
    assert refused.returncode == 2
    assert "--scale-batch without --auto; expected both" in refused.stderr
