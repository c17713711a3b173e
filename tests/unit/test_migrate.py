"""What python -m hvd_keras.migrate says of scripts, and what it changes."""

import ast
import pathlib
import subprocess
import sys

import pytest

from hvd_keras import migrate

KERAS = """\
import keras
from keras import backend as K
import tensorflow as tf
import horovod.keras as hvd
from horovod.keras.callbacks import MetricAverageCallback as Average
hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))
opt = keras.optimizers.Adadelta(lr=args.lr * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="mse", optimizer=opt,
              experimental_run_tf_function=False)
model.compile(experimental_run_tf_function=False, loss="mse", optimizer=opt)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0, device=""), Average()]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("ä-{epoch}.h5"))
score = hvd.allreduce(model.evaluate(x), "score", False)
start = hvd.broadcast(value=start, root_rank=0, name="start")
part = hvd.reducescatter(x, "part", hvd.Sum)
hvd.broadcast_variables(opt.variables(), root_rank=0)
state = hvd.elastic.KerasState(model)
model.fit_generator(data, workers=4)
"""

WRITTEN = """\
import keras
from keras import backend as K
import tensorflow as tf
import hvd_keras as hvd
from hvd_keras.callbacks import MetricAverageCallback as Average
hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))
opt = keras.optimizers.Adadelta(learning_rate=args.lr * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="mse", optimizer=opt)
model.compile(loss="mse", optimizer=opt)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Average()]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("ä-{epoch}.h5"))
score = hvd.allreduce(model.evaluate(x), name="score", average=False)
start = hvd.broadcast(tensor=start, root_rank=0, name="start")
part = hvd.reducescatter(x, name="part", op=hvd.Sum)
hvd.broadcast_variables(opt.variables, root_rank=0)
state = hvd.elastic.KerasState(model)
model.fit_generator(data, workers=4)
"""

# Left to do by hand: the line, and a word of what is said.
LEFT = {7: "disable_v2_behavior", 8: "not needed", 9: "no sessions", 17: "ModelCheckpoint"}
LEFT |= {22: "Checkpoint", 23: "Keras 3: fit,"}


def test_a_script_of_keras() -> None:
    script = migrate.Script(KERAS)
    assert script.written() == WRITTEN
    left = {}
    for finding in script.findings:
        if finding.new is None:
            left.setdefault(script.line(finding), []).append(finding.text)
    assert left.keys() == LEFT.keys()
    for line, word in LEFT.items():
        assert any(word in text for text in left[line]), left[line]
    # A second run finds only what is left.
    assert all(finding.new is None for finding in migrate.Script(WRITTEN).findings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import horovod.tensorflow as hvd", "import hvd_keras as hvd"),
        ("import os, horovod.tensorflow.keras as hvd", "import os, hvd_keras as hvd"),
        ("from horovod.tensorflow.keras import callbacks", "from hvd_keras import callbacks"),
        ("from horovod import run", "from hvd_keras import run"),
        ("import horovod.keras.callbacks as c", "import hvd_keras.callbacks as c"),
        # Horovod's collectives for TensorFlow have the same arguments.
        (
            "import horovod.tensorflow as hvd\nhvd.allreduce(x, True)",
            "import hvd_keras as hvd\nhvd.allreduce(x, True)",
        ),
    ],
)
def test_what_is_certain(text: str, expected: str) -> None:
    script = migrate.Script(text)
    assert script.written() == expected
    assert all(finding.new is not None for finding in script.findings)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import horovod.tensorflow\nhorovod.tensorflow.init()", "write hvd. for"),
        ("import horovod.torch as hvd", "DistributedDataParallel"),
        ("import horovod.spark.keras as hvd", "no Spark estimators"),
        ("from horovod.ray import RayExecutor", "no Ray executor"),
        ("from horovod.tensorflow import keras as hvd", "import hvd_keras as hvd"),
        ("import horovod.common.util as util", "write hvd. for horovod.common.util"),
        ("from horovod.tensorflow.data.compute_service import x", "no such name"),
        ("from horovod.tensorflow import broadcast_", "broadcast_variables"),
        ("import horovod.keras as hvd\nhvd.callbacks.BestModelCheckpoint()", "save_best_only"),
        ("import horovod.keras as hvd\nhvd.allreduce(*values)", "by name"),
        ("import tensorflow as tf\ntf.train.AdamOptimizer(1.0)", "tf.compat.v1.train.Adam"),
        ("import tensorflow as tf\ntf.estimator.Estimator(f)", "removed from TensorFlow"),
        ("import tensorflow.compat.v1 as tf\nopt.variables()", "no method"),
    ],
)
def test_what_is_left_to_people(text: str, told: str) -> None:
    script = migrate.Script(text)
    uncertain = [finding.text for finding in script.findings if finding.new is None]
    assert any(told in text for text in uncertain), uncertain


@pytest.mark.parametrize(
    "text",
    [
        "import tensorflow.compat.v1 as tf\ntf.Session()",
        "import hvd_keras as hvd\nhvd.allreduce(x, name='loss')\nargs.lr",
        "import keras\nkeras.optimizers.SGD(learning_rate=1.0)\nmodel.variables",
    ],
)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert migrate.Script(text).findings == []


def test_the_command(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(KERAS)
    command = [sys.executable, "-m", "hvd_keras.migrate", str(path)]
    first = subprocess.run(command, capture_output=True, text=True)
    assert (first.returncode, first.stderr) == (1, "")
    assert f"{path}:4: import hvd_keras as hvd (--write does it)" in first.stdout
    assert path.read_text() == KERAS
    second = subprocess.run([*command, "--write"], capture_output=True, text=True)
    assert second.stdout == first.stdout.replace("(--write does it)", "(changed)")
    assert path.read_text() == WRITTEN
    ast.parse(WRITTEN)
    path.write_text("print 'Python 2'")
    third = subprocess.run(command, capture_output=True, text=True)
    assert (third.returncode, third.stdout) == (2, "")
    path.write_text("import keras")
    assert subprocess.run(command, capture_output=True).returncode == 0
