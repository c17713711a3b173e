"""``hvdrun --auto``: the first rank runs the script, with the results of one process."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys

import pytest

from tests.harness.launcher import LIMIT, Launcher
from tests.harness.ranks import python

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"
CASES, STEPS = str(SCRIPTS / "auto_cases.py"), str(SCRIPTS / "auto_steps.py")

# Each line is an error that names what to change, or goes on as one process does.
REFUSALS = """
import keras, numpy as np, tensorflow as tf
import hvd_keras as hvd
x = np.ones((8, 2), "float32")
def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made
def strategy():
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        model().fit(x, x[:, :1], verbose=0)
def unseeded():
    rows = np.full((8, 2), __import__("os").getpid() / 1e6, "float32")
    rows = rows[np.argsort([hash((i, __import__("os").getpid())) for i in range(8)])]
    hvd.auto()
    model().fit(rows, x[:, :1], verbose=0)
def own_loop():
    optimizer, net = keras.optimizers.SGD(0.1), model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x))
    weights = net.trainable_weights
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
def fewer_rows():
    first = keras.layers.Lambda(lambda x: x[:1])
    net = keras.Sequential([keras.Input((2,)), first])
    assert net.predict(x, verbose=0).shape == (1, 2)
    assert model().train_on_batch(x[:1], x[:1, :1]) > 0
def compiled():
    net = model()
    net.compile("sgd", "mse", jit_compile=True)
    net.fit(x, x[:, :1], verbose=0)
def raises():
    def step(rows):
        tf.debugging.assert_less(tf.reduce_max(rows), 1.0, "too large")
        return tf.reduce_sum(rows)
    step = tf.function(step)
    assert step(tf.zeros([8, 2])) == 0
    try:
        step(tf.constant(x))
    except tf.errors.InvalidArgumentError as error:
        assert "too large" in str(error), error
    else:
        raise AssertionError
    assert step(tf.zeros([8, 2])) == 0
def interrupted():
    import os, signal
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            os.kill(os.getpid(), signal.SIGINT)
    net = model()
    try:
        net.fit(x, x[:, :1], verbose=0, callbacks=Interrupt())
    except KeyboardInterrupt:
        net.fit(x, x[:, :1], verbose=0)
        return
    raise AssertionError
def breaks_off():
    class Broken(keras.layers.Dense):
        def save_own_variables(self, store):
            raise OSError("no space left")
    net, other = model(), keras.Sequential([keras.Input((2,)), Broken(1)])
    net.save_weights("kept.weights.h5")
    with __import__("contextlib").suppress(OSError):
        other.save_weights("kept.weights.h5")
    net.load_weights("kept.weights.h5")  # of before
def called_twice():
    inner = tf.function(lambda x: tf.reduce_sum(tf.tanh(x) ** 2, 1))
    weight = tf.Variable([[1.0, 2.0]])
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(inner(x * weight))
        return tape.gradient(loss, weight) + tf.reduce_mean(inner(x * weight))
    assert float(tf.reduce_sum(step(tf.constant(x)))) > 0
for case in (
    *(strategy, unseeded, own_loop, fewer_rows, compiled, raises, interrupted),
    *(called_twice, breaks_off, hvd.init, tf.compat.v1.disable_eager_execution),
):
    try:
        case()
        print(case.__name__, "went on")
    except Exception as error:
        print(case.__name__, type(error).__name__, " ".join(str(error).split()))
"""

TOLD = {
    "strategy": "a MirroredStrategy is in force",
    **dict.fromkeys(("unseeded", "own_loop", "fewer_rows", "compiled"), "went on"),
    **dict.fromkeys(("raises", "interrupted", "breaks_off", "called_twice"), "went on"),
    "init": "this one calls hvd.init(). Leave out --auto",
    "disable_eager_execution": "this script calls disable_eager_execution",
}


@pytest.fixture
def launcher(tmp_path: pathlib.Path) -> Launcher:
    made = Launcher(tmp_path)
    made.forks = True  # of what has imported Keras
    return made


def auto(
    launcher: Launcher, size: int, *command: str, divides: bool = True, **options
) -> subprocess.CompletedProcess[str]:
    """Run a job, which divides each step, even if one process is faster."""
    job = ("--auto", "--no-prefix", "-np", str(size), "--oversubscribe", *command)
    environment = launcher.environment | ({"HVD_AUTO": "divided"} if divides else {})
    return launcher.run(*job, env=environment, **options)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?|nan", text)]


@dataclasses.dataclass
class Both:
    """Cases of a script of one process, and what they printed there and by --auto."""

    folder: pathlib.Path
    alone: subprocess.CompletedProcess[str]
    together: subprocess.CompletedProcess[str]

    @classmethod
    def of(cls, folder: pathlib.Path, size: int, *command: str) -> "Both":
        launcher, command = Launcher(folder), (sys.executable, *command)
        (folder / "alone").mkdir()
        alone = subprocess.run(
            command, cwd=folder / "alone", capture_output=True, text=True, timeout=LIMIT
        )
        assert alone.returncode == 0, alone.stderr
        together = auto(launcher, size, *command, timeout=2 * LIMIT)
        assert together.returncode == 0, together.stderr
        return cls(folder, alone, together)

    def check(self) -> None:
        words, other = (re.sub(r"-?[\d.]+", "", job.stdout) for job in (self.together, self.alone))
        assert words == other
        expected = pytest.approx(numbers(self.alone.stdout), rel=1e-4, abs=1e-4, nan_ok=True)
        assert numbers(self.together.stdout) == expected

    def told(self) -> list[set[str]]:
        """The ops of STEPS that the first rank has computed alone, with their lines."""
        lines = self.together.stderr.splitlines()
        told = [line for line in lines if "on the first rank alone, in" in line]
        of_steps = [line for line in told if "(auto_cases.py:" not in line]
        return [set(re.findall(r"(\w+) \(\w+\.py:\d+\)", line)) for line in of_steps]


QUICK = ["arrays", "masks", "custom", "whole", "files", "tables", "python", "steps", "loop"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, QUICK), id="2 ranks"),
        pytest.param((3, [*QUICK, "sources", "more"]), id="3 ranks", marks=pytest.mark.slow),
    ],
)
def both(request, tmp_path_factory) -> Both:
    size, cases = request.param
    return Both.of(tmp_path_factory.mktemp("cases"), size, CASES, *cases)


def left(folder: pathlib.Path) -> set[str]:
    """The files that a script has left, but those of this test."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    names = {path for path in paths if not path.startswith(("alone", "temporary"))}
    return {re.sub(r"tfevents\..*", "tfevents", name) for name in names}


def test_results_are_those_of_one_process(both: Both) -> None:
    both.check()
    # The script's own Python code has seen all rows, once.
    seen = [(folder / "rows").read_text() for folder in (both.folder, both.folder / "alone")]
    assert seen[0] == seen[1]


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


def test_steps_that_clip_mask_skip_and_compare_rows(both: Both) -> None:
    assert "caught True" in both.together.stdout
    # What crosses rows is told with its line; Dense layers, clipping and masks do not.
    assert both.told() == [{"MatMul"}, {"Sub"}, {"Sum"}, {"MatMul", "Equal"}]


@pytest.mark.parametrize(
    ("case", "status", "told"),
    [
        ("exits", 3, "rank 0 failed first: exit status 3"),
        ("fails", 1, "KeyError: 'of the script'"),
        pytest.param("leaves", 4, "rank 0 failed first: exit status 4", marks=pytest.mark.slow),
        ("kills", 137, "rank 1 failed first: killed by SIGKILL"),
        ("chooses", 1, "this script uses tf_keras. Leave out --auto"),
    ],
)
def test_the_script_ends_the_job(launcher: Launcher, case: str, status: int, told: str) -> None:
    job = auto(launcher, 2, sys.executable, STEPS, case)
    assert (job.returncode, job.stdout.count(case)) == (status, 1)
    assert told in job.stderr
    assert ("None was one that it divides" in job.stderr) == (case == "exits")  # which is eager
    assert "left while others waited" not in job.stderr


def test_what_is_refused_and_what_goes_on(launcher: Launcher) -> None:
    job = auto(launcher, 2, launcher.script(REFUSALS))
    assert job.returncode == 0, job.stderr
    told = dict(line.split(" ", 1) for line in job.stdout.splitlines())
    assert told.keys() == TOLD.keys()
    assert not [(name, text) for name, text in told.items() if TOLD[name] not in text]
    assert "cannot be divided: ValueError" not in job.stderr


def test_the_faster_way_is_kept_and_told(launcher: Launcher) -> None:
    script = """
    import hvd_keras as hvd
    hvd.auto()
    import keras, numpy as np
    x = np.ones((320, 2), "float32")
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    net.compile("sgd", "mse")
    for _ in range(60):  # until steps have taken as long as it takes to divide them
        loss = net.fit(x, x[:, :1], batch_size=16, epochs=10, verbose=0).history["loss"][0]
    print(loss < 1)
    """
    job = ("--no-prefix", "-np", "2", "--oversubscribe", launcher.script(script))
    job = launcher.run(*job, env=launcher.environment | {"HVD_LOG_LEVEL": "info"})
    assert (job.returncode, job.stdout) == (0, "True\n"), job.stderr
    lines = [line for line in job.stderr.splitlines() if "hvdrun --auto" in line]
    (line,) = (line for line in lines if "train_step of model 'sequential'" in line)
    alone, together = map(float, re.findall(r"takes? ([\d.e+]+) ms", line))
    assert ("divides the" in line) == (together <= alone), line
    assert ("one process is faster in the" in line) == (together > alone), line
    assert "too little time" not in job.stderr


def test_a_job_that_is_too_short_to_be_divided_says_so(launcher: Launcher) -> None:
    script = """
    import tensorflow as tf
    step = tf.function(lambda x: tf.reduce_sum(x))
    print(float(step(tf.ones([8]))))
    print(*sorted(os.sched_getaffinity(0)), os.environ["TF_NUM_INTRAOP_THREADS"])
    """
    job = auto(launcher, 2, launcher.script(script), divides=False)
    # The first rank may compute whole steps, which must take no longer than in one process.
    told = ["8.0", " ".join(map(str, [*sorted(os.sched_getaffinity(0)), 0]))]
    assert (job.returncode, job.stdout.splitlines()) == (0, told), job.stderr
    assert job.stderr.count("too little time to try whether 2 ranks are faster") == 1


# Prints losses before and after an interrupt, and after the death of a worker.
SESSION = """
import contextlib, os, pathlib, signal, sys
import hvd_keras as hvd
if sys.argv[1] == "session":
    hvd.auto(np=3)
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
keras.utils.set_random_seed(1)
net = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
net.compile("sgd", "mse")
class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), signal.SIGINT)
def fit(*callbacks):
    history = net.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False, callbacks=callbacks)
    print(history.history["loss"][0])
fit()
try:
    fit(Interrupt())
except KeyboardInterrupt:
    print("interrupted")
fit()
if sys.argv[1] == "session":
    hvd.auto(np=3)  # as a cell that runs again
    try:
        hvd.auto(np=4)
    except ValueError as error:
        print(error, file=sys.stderr)
    job = f"HVDRUN_JOB={os.environ['HVDRUN_JOB']}".encode()
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            command = (folder / "cmdline").read_bytes().split(b"\\0")
            if command[1:4] == [b"-m", b"hvd_keras.auto", b"--session"]:
                variables = (folder / "environ").read_bytes().split(b"\\0")
                ranks = b"OMPI_COMM_WORLD_RANK=2", b"PMI_RANK=2"
                if job in variables and any(rank in variables for rank in ranks):
                    os.kill(int(folder.name), signal.SIGKILL)
    before = net.get_weights()
    try:
        fit()
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
    net.set_weights(before)
fit()
"""


def test_a_session_starts_workers_and_outlives_them(launcher: Launcher) -> None:
    path = launcher.folder / "session.py"
    path.write_text(SESSION)
    script = [sys.executable, str(path)]
    options = {"cwd": launcher.folder, "capture_output": True, "text": True, "timeout": LIMIT}
    environment = launcher.environment | {"HVD_AUTO": "divided"}
    alone = subprocess.run([*script, "alone"], **options)
    job = subprocess.run([*script, "session"], env=environment, **options)
    assert (job.returncode, job.stdout.count("interrupted")) == (0, 1), job.stderr
    assert len(numbers(job.stdout)) == 3
    assert numbers(job.stdout) == pytest.approx(numbers(alone.stdout), rel=1e-4)
    assert "hvd.auto: got np=4, expected 3: it has begun" in job.stderr
    assert "a worker of hvd.auto has ended, and hvdrun has printed why" in job.stderr
    assert "rank 2 failed first: killed by SIGKILL" in job.stderr


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
    launcher.script("import hvd_keras as hvd; hvd.auto(np=2)", "starts.py")
    job = launcher.run("-np", "2", "--oversubscribe", "starts.py", status=1)
    assert "hvd.auto: got np=2, hosts=None in a job of" in job.stderr
    launcher.script("import warnings; warnings.warn('odd'); open('made', 'x')", "makes.py")
    job = auto(launcher, 2, "makes.py")
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("UserWarning: odd") == 1


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
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": LIMIT}
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
    alone = python(script, status=0)
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
    refused = launcher.run("--scale-batch", "-np", "2", script, status=2)
    assert "--scale-batch without --auto; expected both" in refused.stderr
