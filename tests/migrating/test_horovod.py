"""Programs that import Horovod, run as they are; and programs that never call hvd.init()."""

import os
import pathlib
import sys

import pytest

from tests.harness import ranks

PROGRAM = """
import importlib.util
import sys
assert importlib.util.find_spec("horovod") is not None
try:
    import horovod.tensorflow as hvd
except ImportError:
    sys.exit("serial")
hvd.init()
print(f"sum {int(hvd.allreduce(hvd.rank() + 1, op=hvd.Sum))} of {sys.argv[1:]}")
"""

SAID = "'horovod' is hvd_keras"


def check(job: ranks.Job) -> None:
    assert job.status == 0, job.output
    assert job.output.count("sum 3 of ['a', '-b']") == 2, job.output
    assert job.output.count(SAID) == 1, job.output


def python(tmp_path: pathlib.Path, *options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    return [sys.executable, *options, str(script), "a", "-b"]


def test_hvdrun(hvdrun) -> None:
    (hvdrun.folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "train.py", "a", "-b"]
    done = hvdrun.run("--horovod", "-np", "2", "--oversubscribe", *command)
    check(ranks.Job(done.returncode, done.stdout + done.stderr))
    without = hvdrun.run("-np", "1", *command)
    assert "serial" in without.stderr or "AssertionError" in without.stderr


def test_module_as_a_launcher_of_scripts(tmp_path: pathlib.Path) -> None:
    check(ranks.mpirun(2, *python(tmp_path, "-u", "-m", "hvd_keras.horovod")))


def test_module_refuses_an_unknown_setting() -> None:
    env = {"HOROVOD_LOG_LEVEL": "loud"}
    job = ranks.mpirun(1, sys.executable, "-m", "hvd_keras.horovod", "true", env=env)
    assert "python -m hvd_keras.horovod: the log level is 'loud'; expected" in job.output
    assert "Traceback" not in job.output
    assert job.status != 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["program", "module"])
def test_module_as_a_launcher_of_programs(kind: str, tmp_path: pathlib.Path) -> None:
    if kind == "program":
        program = tmp_path / "trainer"
        program.write_text(f"#!{sys.executable}\n{PROGRAM}")
        program.chmod(0o700)
        words = ["trainer"]
    else:
        (tmp_path / "trainer.py").write_text(PROGRAM)
        words = ["-m", "trainer"]
    start = [sys.executable, "-m", "hvd_keras.horovod"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    check(ranks.mpirun(2, *start, *words, "a", "-b", env=env))


def test_install(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("import hvd_keras.horovod\nhvd_keras.horovod.install()\n" + PROGRAM)
    check(ranks.mpirun(2, sys.executable, str(script), "a", "-b"))


def test_another_horovod_is_named(tmp_path: pathlib.Path) -> None:
    """As an installed distribution, which is hidden, and as a module that was imported before."""
    (tmp_path / "horovod-0.27.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: horovod\nVersion: 0.27.0\n"
    (tmp_path / "horovod-0.27.0.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "horovod.py").write_text("")
    script = tmp_path / "notebook.py"
    script.write_text(
        "import hvd_keras.horovod\n"
        "hvd_keras.horovod.install()\n"
        "import horovod.keras\n"
        "horovod.keras.init()\n"
        "for name in list(sys.modules):\n"
        "    if name.startswith('horovod'):\n"
        "        del sys.modules[name]\n"
        "sys.path.remove(hvd_keras.horovod.PATH)\n"
        "import horovod\n"
        "hvd_keras.horovod.install()\n".replace("import hvd_keras", "import sys, hvd_keras", 1)
    )
    job = ranks.mpirun(1, sys.executable, str(script))
    assert "instead of the installed horovod 0.27.0" in job.output, job.output
    assert "RuntimeError: hvd_keras.horovod.install: 'import horovod' finds" in job.output
    assert job.status != 0


def test_horovod_run(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("""
import hvd_keras.horovod
hvd_keras.horovod.install()
import horovod

def train(rate, steps=1):
    import horovod.tensorflow as hvd
    hvd.init()
    return hvd.rank() * rate + steps + int(hvd.allreduce(hvd.rank(), op=hvd.Sum))

options = dict(num_proc=2, hosts="localhost:2", use_gloo=True, mpi_args="--oversubscribe")
print(horovod.run(train, (10,), {"steps": 2}, start_timeout=60, **options))
try:
    horovod.run(train, np=1, slots=3)
except TypeError as error:
    print(error)
""")
    job = ranks.mpirun(1, sys.executable, str(script), status=0)
    assert "[3, 13]" in job.output, job.output
    assert "hvdrun has nothing for slots=3" in job.output


# As scripts for tf.keras before Keras 3 are.
TF_KERAS = """
import os
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
for gpu in tf.config.experimental.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
start = 0
for epoch in range(9, 0, -1):
    if hvd.rank() == 0 and os.path.exists(f"checkpoint-{epoch}.h5"):
        start = epoch
        break
start = int(hvd.broadcast(start, 0, name="start"))
random = np.random.default_rng(hvd.rank())
x = random.normal(size=(32, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat().batch(4)
tf.keras.utils.set_random_seed(1 + hvd.rank())
rate = 0.01 * hvd.size()
if start > 0 and hvd.rank() == 0:
    model = hvd.load_model(f"checkpoint-{start}.h5", compression=hvd.Compression.fp16)
else:
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])
    opt = hvd.DistributedOptimizer(tf.optimizers.Adam(rate), compression=hvd.Compression.fp16,
                                   backward_passes_per_step=1, average_aggregated_gradients=True)
    model.compile(loss=tf.losses.MeanSquaredError(), optimizer=opt, metrics=["mae"],
                  experimental_run_tf_function=False)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))
model.fit(data, steps_per_epoch=8 // hvd.size(), callbacks=callbacks, epochs=start + 3,
          initial_epoch=start, verbose=0)
loss, _ = hvd.allreduce(model.evaluate(data, steps=4, verbose=0), "evaluation")
weights = np.concatenate([w.ravel() for w in model.get_weights()])
everyone = hvd.allgather(weights[np.newaxis], name="weights")
print("from", start, "equal", bool(np.all(everyone == everyone[0])), "loss", float(loss))
"""


@pytest.mark.slow
def test_a_script_for_tf_keras(hvdrun) -> None:
    (hvdrun.folder / "train.py").write_text(TF_KERAS)
    hvdrun.environment["TF_USE_LEGACY_KERAS"] = "1"
    losses = []
    for start in (0, 3):
        command = ("--horovod", "-np", "2", "--oversubscribe", sys.executable, "train.py")
        done = hvdrun.run(*command, status=0)
        lines = [line for line in done.stdout.splitlines() if "equal" in line]
        said, loss = zip(*(line.split(" loss ") for line in lines), strict=True)
        assert sorted(said) == [f"[{rank}] from {start} equal True" for rank in range(2)]
        assert loss[0] == loss[1]
        losses.append(float(loss[0]))
    assert losses[1] < losses[0]


ALONE = """
import keras, tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.ones([4, 2])) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""


def test_a_loop_without_an_exchange_warns_at_its_end(hvdrun) -> None:
    (hvdrun.folder / "train.py").write_text(ALONE)
    command = ("--horovod", "-np", "2", "--oversubscribe", sys.executable, "train.py")
    done = hvdrun.run(*command, status=0)
    assert done.stderr.count("SGD applies gradients of this rank alone") == 1, done.stderr


# Programs that never call hvd.init()

SERIAL = """
import sys
sys.stdout.flush()
try:
    import horovod.tensorflow as hvd
    hvd.no_such_name
except AttributeError:
    hvd = None
print("trained")
"""
TOLD = "hvdrun: saw no rank complete hvd.init(), so these were separate runs"

FAILED = """
import hvd_keras as hvd
os.environ["HVD_BUCKET_BYTES"] = "many"
try:
    hvd.init()
except ValueError:
    print("trained")
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("options", "text", "status"),
    [
        (["--horovod"], SERIAL, 1),
        (["--horovod", "--max-restarts", "2"], SERIAL, 1),
        (["--horovod", "--no-init"], SERIAL, 0),
        (["--horovod"], "print('trained')", 1),  # a Python that does not see PYTHONPATH, say
        ([], "import hvd_keras as hvd; hvd.linear_scaling; print('trained')", 1),
        ([], FAILED, 1),
        ([], "import hvd_keras; print('trained')", 1),
        (["--no-init"], "print('trained')", 0),
    ],
    ids=["import", "restarts", "no init", "nothing", "hvd_keras", "failed", "unused", "other"],
)
def test_separate_runs_are_a_failure(hvdrun, options, text, status) -> None:
    command = [sys.executable, hvdrun.script(text)]
    hvdrun.options = []
    done = hvdrun.run(*options, "-np", "2", "--oversubscribe", *command)
    assert done.stdout.count("trained") == 2, done.stderr
    assert (done.returncode, done.stderr.count(TOLD)) == (status, status), done.stderr


def test_a_rank_that_runs_without_the_others_is_named(hvdrun) -> None:
    """After what has ended the job: rank 0 has waited for it."""
    text = """
        if rank == 1:
            open("new", "w").write(str(os.getpid()))
            os.rename("new", "process")
            sys.exit()
        import hvd_keras as hvd
        while not os.path.exists("process"):
            time.sleep(0.02)
        while os.path.exists("/proc/" + open("process").read()):  # until its end is known
            time.sleep(0.02)
        hvd.init()
    """
    hvdrun.options = []
    hvdrun.environment |= {"HVD_TIMEOUT_SECONDS": "2", "HVD_FIRST_TIMEOUT_SECONDS": "2"}
    done = hvdrun.python(2, text)
    first, *others = [line for line in done.stderr.splitlines() if line.startswith("hvdrun: ")]
    assert done.returncode == 1, done.stderr
    assert first.startswith("hvdrun: rank 1 exited (status 0) while the others"), done.stderr
    said = "hvdrun: rank 1 has not completed hvd.init(), and has run without the others"
    assert sum(line.startswith(said) for line in others) == 1, done.stderr


def test_one_rank_needs_no_init(hvdrun) -> None:
    hvdrun.options = []
    done = hvdrun.run("--horovod", "-np", "1", sys.executable, hvdrun.script("print('trained')"))
    assert (done.returncode, done.stderr) == (0, "")
