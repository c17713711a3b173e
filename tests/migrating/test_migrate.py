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
schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.9, n)
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("ä-{epoch}.h5"))
score = hvd.allreduce(model.evaluate(x), "score", False)
start = hvd.broadcast(value=start, root_rank=0, name="start")
part = hvd.reducescatter(x, "part", hvd.Sum)
hvd.broadcast_variables(opt.variables(), root_rank=0)
state = hvd.elastic.KerasState(model)
K.set_value(opt.lr, K.get_value(opt.lr) / 2)
model.fit_generator(data, 9, workers=4, epochs=2)
"""

WRITTEN = """\
import keras
from keras import backend as K
import tensorflow as tf
import hvd_keras as hvd
from hvd_keras.horovod import elastic
from hvd_keras.callbacks import MetricAverageCallback as Average
hvd.init()
opt = keras.optimizers.Adadelta(learning_rate=args.lr * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="mse", optimizer=opt)
model.compile(loss="mse", optimizer=opt)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Average()]
schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.9 ** (epoch - n), n)
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("ä-{epoch}.h5"))
score = hvd.allreduce(model.evaluate(x), name="score", average=False)
start = hvd.broadcast(tensor=start, root_rank=0, name="start")
part = hvd.reducescatter(x, name="part", op=hvd.Sum)
hvd.broadcast_variables(opt.variables, root_rank=0)
state = elastic.KerasState(model)
opt.learning_rate.assign(opt.learning_rate.numpy() / 2)
model.fit(data, steps_per_epoch=9, epochs=2)
"""

# Left to do by hand: the line, and a word of what is said.
LEFT = {18: "ModelCheckpoint"}


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


GRAPH = """\
import numpy, tensorflow as tf
import horovod
import horovod.tensorflow as hvd
if True:
    config = tf.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
x = tf.placeholder(tf.float32, [None, 3])
loss = tf.losses.absolute_difference(x, dense(x, training=mode == tf.estimator.ModeKeys.TRAIN))
opt = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.1), use_locking=True)
with tf.train.MonitoredTrainingSession(config=config) as session:
    session.run(opt.minimize(loss), {x: numpy.ones((2, 3))})
slots = opt.variables()
horovod.run(train, np=2, use_gloo=True, hosts="here:2", verbose=2)
"""

GRAPH_WRITTEN = """\
import numpy, tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import hvd_keras
import hvd_keras as hvd
if True:
    config = tf.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
x = tf.placeholder(tf.float32, [None, 3])
loss = tf.losses.absolute_difference(x, dense(x, training=mode == "train"))
opt = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.1))
with tf.train.MonitoredTrainingSession(config=config) as session:
    session.run(opt.minimize(loss), {x: numpy.ones((2, 3))})
slots = opt.variables()
hvd_keras.run(train, np=2, hosts="here:2")
"""


def test_a_script_of_tensorflow_1() -> None:
    script = migrate.Script(GRAPH)
    assert script.written() == GRAPH_WRITTEN
    left = {script.line(finding): finding.text for finding in script.findings if not finding.new}
    assert left.keys() == {6, 9, 13}
    assert all(finding.new is None for finding in migrate.Script(GRAPH_WRITTEN).findings)


@pytest.mark.parametrize(
    "text",
    [
        # The configuration has another use; nothing would be left of the block.
        "K.set_session(tf.Session(config=config))\nserve(config)\n",
        "if gpus:\n    K.set_session(tf.Session(config=config))\n",
    ],
)
def test_a_configuration_with_another_use_stays(text: str) -> None:
    head = "import keras.backend as K\nimport tensorflow.compat.v1 as tf\n"
    head += "config = tf.ConfigProto()\n"
    script = migrate.Script(head + text)
    assert script.written() == head + text
    assert any("no sessions" in finding.text for finding in script.findings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import horovod.tensorflow as hvd", "import hvd_keras as hvd"),
        ("from horovod.tensorflow import keras as hvd", "import hvd_keras as hvd"),
        (
            "import horovod.tensorflow\nhorovod.tensorflow.init()",
            "import hvd_keras\nhvd_keras.init()",
        ),
        (
            "import horovod.keras.callbacks\nhorovod.keras.callbacks.MetricAverageCallback('')",
            "import hvd_keras\nhvd_keras.callbacks.MetricAverageCallback('')",
        ),
        ("from horovod import run\nrun(f, num_proc=2)", "from hvd_keras import run\nrun(f, np=2)"),
        (
            "from keras.preprocessing import image\nimage.ImageDataGenerator()",
            "from tensorflow.keras.preprocessing import image\nimage.ImageDataGenerator()",
        ),
        (
            "model.evaluate_generator(generator=data, workers=4, steps=3)",
            "model.evaluate(x=data, steps=3, verbose=0)",
        ),
        ("model.evaluate_generator(data, workers=4)", "model.evaluate(data, verbose=0)"),
        ("model.predict_generator(data, 3, verbose=1)", "model.predict(data, steps=3, verbose=1)"),
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
        ("import horovod\nhorovod.run(f, min_np=2)", "options=["),
        ("import tensorflow as tf\ny = tf.layers.dense(x, 1)", "TF_USE_LEGACY_KERAS=1"),
        ("import keras.backend as K\nK.set_value(*pair)", "assign"),
        ("model.fit_generator(*arguments)", "Keras 3: fit,"),
        ("opt = parse()\nopt.lr", "learning_rate"),
        ("import horovod.torch as hvd", "DistributedDataParallel"),
        ("import horovod.spark.keras as hvd", "no Spark estimators"),
        ("from horovod.ray import RayExecutor", "hvd.ray.run"),
        ("import horovod.common.util as util", "write hvd. for horovod.common.util"),
        ("from horovod.tensorflow.data.compute_service import x", "hvd_keras.data.shard"),
        ("from horovod.tensorflow.gradient_aggregation import x", "has backward_passes_per_step"),
        ("from horovod.tensorflow import broadcast_", "broadcast_variables"),
        ("import horovod.keras as hvd\nhvd.callbacks.BestModelCheckpoint()", "save_best_only"),
        ("import horovod.keras as hvd\nhvd.allreduce(*values)", "by name"),
        ("from tensorflow import train\ntrain.AdamOptimizer(1.0)", "tf.compat.v1.train.Adam"),
        (
            "import tensorflow as tf\ntf.optimizers.Adam()\ntf.train.AdamOptimizer(1.0)",
            "tf.compat.v1.train.Adam",
        ),
        ("import tensorflow as tf\ntf.estimator.Estimator(f)", "removed from TensorFlow"),
        ("import tensorflow.compat.v1 as tf\nopt.variables()", "no method"),
        (
            "import tensorflow as tf\nm = tf.keras.Sequential()\ntf.train.AdamOptimizer(0.1)",
            "TF_USE_LEGACY_KERAS=1",
        ),
        ("config.gpu_options.visible_device_list = ''", "set_visible_devices([], 'GPU')"),
        ("config.gpu_options.visible_device_list = str(hvd.local_rank())", "not needed"),
        ("import horovod.keras as hvd\nhvd.load_model('best-{epoch}.h5')", "write .keras"),
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
        "import tensorflow.compat.v1 as tf\no = tf.train.AdamOptimizer(0.1)\no.variables()",
        "import hvd_keras as hvd\nhvd.load_model('best.keras')\nm.load_weights('m.weights.h5')",
        "import hvd_keras as hvd\nhvd.allreduce(x, name='loss')\nargs.lr",
        "import tensorflow as tf\ntf.losses.categorical_crossentropy(y, p)",
        "import tensorflow as tf\ntf.metrics.binary_accuracy(y, p)",
        "import keras\nkeras.optimizers.SGD(learning_rate=1.0)\nmodel.variables",
    ],
)
def test_correct_code_is_unchanged(text: str) -> None:
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


def test_lines_are_those_of_python(tmp_path: pathlib.Path) -> None:
    """Other characters at which text may be split end no line; line ends and mode stay."""
    text = "#!/bin/python\r\n\x0c\r\n'\x85\u2028'\r\nimport horovod.keras as hvd\r\nhvd.init()\r\n"
    path = tmp_path / "train.py"
    path.write_bytes(text.encode())
    path.chmod(0o750)
    (tmp_path / "link.py").symlink_to(path)
    command = [sys.executable, "-m", "hvd_keras.migrate", str(tmp_path / "link.py"), "--write"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "link.py:4: import hvd_keras as hvd" in done.stdout
    assert path.read_bytes() == text.replace("horovod.keras", "hvd_keras").encode()
    assert path.stat().st_mode & 0o777 == 0o750
    assert sorted(tmp_path.iterdir()) == [tmp_path / "link.py", path]
