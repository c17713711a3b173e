"""Lines that a script lacks are an error with the line to add, or one warning on stderr."""

import pathlib

import pytest

from tests.harness import ranks

START = """
import os, sys, time
import keras, numpy as np, tensorflow as tf
import hvd_keras as hvd
hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())
x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
def fit(optimizer, callbacks, **options):
    model.compile(optimizer=optimizer, loss="mse", **options)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
"""

LOOP = """
optimizer = keras.optimizers.SGD(0.01)
@tf.function
def step(images, first):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(images) - 1.0) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
for batch in range(200):
    step(tf.constant(x), batch == 0)
    time.sleep(0.01)
"""

TAPE = "    tape = hvd.DistributedGradientTape(tape)\n"
ALONE = LOOP.replace(TAPE, "")
# The loss that is logged is exchanged, but not the gradients.
NO_TAPE = ALONE.replace("    optimizer.", "    mean = hvd.allreduce(loss)\n    optimizer.")
OTHER_RATES = ALONE.replace(
    "keras.optimizers.SGD(0.01)",
    "hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * (1 + hvd.rank())))",
)
# Nor does what a layer exchanges say anything about the gradients.
SYNCHRONIZED = """
model = keras.Sequential([keras.layers.BatchNormalization(synchronized=True), model])
"""
# A loss for a log, which an eager loop averages between the two calls.
LOGGED = NO_TAPE.replace("@tf.function\n", "")
BUILT = "model(x)\nhvd.broadcast_variables(model.variables, 0)\n"

# What hvd_keras reduces for the first model says nothing about the second.
SECOND_MODEL = """
model = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(1)])
average = hvd.callbacks.MetricAverageCallback()
fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), [broadcast, average], metrics=["mae"])
model = keras.Sequential([keras.layers.Dense(1)])
fit(keras.optimizers.SGD(0.01), [broadcast])
"""

# The exchange of one optimizer is none of the other's gradients.
ONE_OF_TWO = """
other = keras.models.clone_model(model)
hvd.broadcast_variables(other.variables, 0)
pairs = [(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))]
pairs += [(other, keras.optimizers.SGD(0.01))]
for _ in range(3):
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_mean((net(x) - y) ** 2) for net, _ in pairs]
    found = [tape.gradient(loss, net.weights) for loss, (net, _) in zip(losses, pairs)]
    for gradients, (net, optimizer) in zip(found, pairs):
        optimizer.apply(gradients, net.weights)
"""

NOT_DISTRIBUTED = "applies gradients of this rank alone"
DIFFERENT = "began to train with different weights"


# No optimizer: the script assigns what it makes of its gradients.
ASSIGNED = LOGGED.replace(
    "optimizer.apply_gradients(zip(gradients, model.trainable_variables))",
    "[v.assign_sub(0.01 * g) for v, g in zip(model.trainable_variables, gradients)]",
)


ONE_NUMBER = """
variable = tf.Variable(1.0)
with tf.GradientTape() as tape:
    loss = variable * (2.0 + hvd.rank())
gradient = tape.gradient(loss, variable)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
variable.assign_sub(0.1 * hvd.allreduce(gradient))
"""


@pytest.mark.parametrize("tape", ["forgotten", "there", "of a number"])
def test_gradients_that_a_script_assigns_itself(hvdrun, tape) -> None:
    """That is not known while it runs: a tape may also serve an analysis."""
    code = ASSIGNED
    if tape == "there":
        code = ASSIGNED.replace("    gradients =", TAPE + "    gradients =")
    elif tape == "of a number":
        code = ONE_NUMBER
    # Which disables the loggers that it does not name.
    configured = 'import logging.config\nlogging.config.dictConfig({"version": 1})\n'
    code = START + BUILT + configured + code
    done = hvdrun.python(2, code, env=hvdrun.environment | {"HVD_STRICT": "0"}, status=0)
    assert (
        "they have exchanged none, and no optimizer of Keras has applied any" in done.stderr
    ) == (tape == "forgotten")


# What was called before, and steps of other kinds: parallel/features/test_earlier_calls.py.
@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("script", "told"),
    [
        pytest.param(SECOND_MODEL, NOT_DISTRIBUTED, id="second optimizer"),
        pytest.param(
            "fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), [])",
            DIFFERENT,
            id="broadcast",
        ),
        pytest.param(LOOP, DIFFERENT, id="broadcast, loop"),
        pytest.param(BUILT + NO_TAPE, NOT_DISTRIBUTED, id="tape, loop"),
        pytest.param(SYNCHRONIZED + BUILT + ALONE, NOT_DISTRIBUTED, id="tape, loop, layer"),
        pytest.param(BUILT + ONE_OF_TWO, NOT_DISTRIBUTED, id="one of two optimizers, eager loop"),
        pytest.param(BUILT + LOGGED, NOT_DISTRIBUTED, id="tape, eager loop, loss"),
        pytest.param(
            BUILT + OTHER_RATES,
            "began to train with different learning rates",
            id="other rates, loop",
        ),
        pytest.param(
            f"{BUILT}{LOOP}model = keras.models.clone_model(model)\n{LOOP}",
            DIFFERENT,
            id="broadcast, second loop",
        ),
    ],
)
def test_a_forgotten_line_is_an_error_or_one_warning(
    script: str, told: str, tmp_path: pathlib.Path
) -> None:
    script = f"{START}{script}\nprint('went on')\n"
    line = "hvd.DistributedOptimizer(SGD(...))" if told == NOT_DISTRIBUTED else "roadcast"
    job = ranks.run_script(tmp_path, 2, script, TF_CPP_MIN_LOG_LEVEL="3", status=1)
    assert told in job.output
    assert line in job.output
    assert "HVD_STRICT=0 makes this error a warning" in job.output
    assert "went on" not in job.output
    job = ranks.run_script(tmp_path, 2, script, TF_CPP_MIN_LOG_LEVEL="3", HVD_STRICT="0", status=0)
    assert job.output.count("hvd_keras WARNING") == 1, job.output
    assert job.output.count(told) == 1, job.output
    assert line in job.output


def test_a_broadcast_of_nothing_hides_nothing(tmp_path: pathlib.Path) -> None:
    script = "hvd.broadcast_variables(model.variables, 0)\n"
    script += "fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), [])"
    job = ranks.run_script(tmp_path, 2, START + script, TF_CPP_MIN_LOG_LEVEL="3", status=1)
    assert "hvd.broadcast_variables got no variables" in job.output
    assert DIFFERENT in job.output


NOTHING_IS_FORGOTTEN = """
fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), [broadcast])  # the four lines

model = keras.Sequential([keras.layers.Dense(1)])
with hvd.local_fit():  # on purpose
    fit(keras.optimizers.SGD(0.01), [])

model = keras.Sequential([keras.layers.Dense(1)])  # Horovod's loop: broadcast after the first step
optimizer = keras.optimizers.SGD(0.01)
@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(tf.constant(x)) - 1.0) ** 2)
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
for batch in range(60):
    step()
    if batch == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)

model = keras.Sequential([keras.layers.Dense(1)])  # averaged by hand
model(x)
hvd.broadcast_variables(model.variables, root_rank=0)
optimizer = keras.optimizers.Adam(0.01)
for batch in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - 1.0) ** 2)
    gradients = [hvd.allreduce(g) for g in tape.gradient(loss, model.trainable_variables)]
    loss = hvd.allreduce(loss)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

@tf.function
def gradients_of(images):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(images) - 1.0) ** 2)
    return tape.gradient(loss, model.trainable_variables)
for batch in range(3):
    gradients = [hvd.allreduce(g) for g in gradients_of(x)]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

total = tf.Variable(tf.zeros([4, 1]))  # averaged by hand in a graph, in every second step
kernel = tf.Variable(tf.ones([4, 1]))
optimizer = keras.optimizers.SGD(0.01)
optimizer.build([kernel])
@tf.function
def add(last):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ kernel - 1.0) ** 2)
    total.assign_add(tape.gradient(loss, kernel))
    if last:
        total.assign(hvd.allreduce(total))
        optimizer.apply_gradients([(total / 2.0, kernel)])
        total.assign(tf.zeros_like(total))
for batch in range(4):
    add(tf.constant(batch % 2 == 1))

import hvd_keras.horovod  # a rank outside of a process set, or alone in one
hvd_keras.horovod.install()
import horovod.tensorflow.keras as horovod
import horovod.tensorflow as horovod_tensorflow
for process_set in (hvd.add_process_set([0]), hvd.add_process_set([1])):
    alone = keras.Sequential([keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    alone.compile(horovod.DistributedOptimizer(optimizer, process_set=process_set), loss="mse")
    alone.fit(x, y, verbose=0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer = horovod.PartialDistributedOptimizer(optimizer, process_set=process_set)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_mean(alone(x) ** 2))
    optimizer.apply(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables)
    optimizer = keras.optimizers.SGD()
    alone = keras.Sequential([keras.layers.Dense(1)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(alone(x) ** 2)
    tape = horovod_tensorflow.DistributedGradientTape(tape, process_set=process_set)
    optimizer.apply(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables)

weights = hvd.allgather(np.concatenate([w.ravel() for w in model.get_weights()])[None]).numpy()
assert (weights == weights[0]).all()
"""


def test_no_warning_where_nothing_is_forgotten(tmp_path: pathlib.Path) -> None:
    job = ranks.run_script(tmp_path, 2, START + NOTHING_IS_FORGOTTEN, TF_CPP_MIN_LOG_LEVEL="3")
    assert job.status == 0, job.output
    assert "hvd_keras" not in job.output, job.output
    assert "AutoGraph" not in job.output, job.output
