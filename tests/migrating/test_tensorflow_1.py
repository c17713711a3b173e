"""Scripts for TensorFlow 1 run with only the import changed.

In separate jobs, because a process runs either eagerly or not.
"""

import pathlib

import pytest

from tests.harness.ranks import run_script

# Like the scripts in the literature, with other data. Each rank uses its rows of each batch, and
# one process uses the whole batch.
TENSORFLOW_1 = """
import os, sys
import numpy as np
import tensorflow as tf
tf.compat.v1.disable_v2_behavior()
import hvd_keras as hvd

hvd.init()
tf.compat.v1.enable_eager_execution()  # which TensorFlow refuses if there is a default graph
assert tf.executing_eagerly()
tf.compat.v1.disable_eager_execution()
rank, size = hvd.rank(), hvd.size()
random = np.random.default_rng(3)
x = random.normal(size=(6, 8, 5)).astype("float32")
words = random.integers(0, 20, (6, 8, 3))
y = random.normal(size=(6, 8, 1)).astype("float32")

def model(make_optimizer, seed, rows):
    tf.compat.v1.set_random_seed(seed)
    features, labels = tf.constant(x[:, rows]), tf.constant(y[:, rows])
    step = tf.compat.v1.train.get_or_create_global_step()
    table = tf.compat.v1.get_variable("table", [20, 4])
    kernel = tf.compat.v1.get_variable("kernel", [9, 1])
    unused = tf.compat.v1.get_variable("unused", [2])
    embedded = tf.nn.embedding_lookup(table, tf.gather(tf.constant(words[:, rows]), step % 6))
    inputs = tf.concat([tf.gather(features, step % 6), tf.reduce_sum(embedded, 1)], 1)
    loss = tf.reduce_mean(tf.square(tf.tanh(inputs) @ kernel - tf.gather(labels, step % 6)))
    return loss, make_optimizer(), step

def weights(session):
    return np.concatenate([v.ravel() for v in session.run(tf.compat.v1.trainable_variables())])

optimizers = {
    "Adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(0.01 * hvd.size()),
    "Adam": lambda: tf.compat.v1.train.AdamOptimizer(0.01 * hvd.size()),
    "Momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.01 * hvd.size(), 0.9),
}
for name, make_optimizer in optimizers.items():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss, opt, step = model(make_optimizer, 0, slice(None))
        try:
            opt.minimize(loss)
        except RuntimeError as error:
            assert "Optimizer applies gradients of this rank alone" in str(error)
        else:
            raise AssertionError("each rank may train alone")
        with hvd.local_fit():
            train_op = opt.minimize(loss, global_step=step)
        session.run(tf.compat.v1.global_variables_initializer())
        start = weights(session)
        for _ in range(12):
            session.run(train_op)
        alone = weights(session)

    with tf.Graph().as_default():
        loss, opt, step = model(make_optimizer, rank, slice(rank, None, size))
        opt = hvd.DistributedOptimizer(opt)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.compat.v1.train.StopAtStepHook(12)]
        train_op = opt.minimize(loss, global_step=step)
        checkpoint_dir = f"{sys.argv[0]}.{name}" if hvd.rank() == 0 else None
        config = tf.compat.v1.ConfigProto()
        with tf.compat.v1.train.MonitoredTrainingSession(
            checkpoint_dir=checkpoint_dir, config=config, hooks=hooks
        ) as mon_sess:
            while not mon_sess.should_stop():
                mon_sess.run(train_op)
                raw = mon_sess._tf_sess()
            # The graph is finalised by now.
            assert hvd.broadcast_object({"rank": rank}, 0, session=raw) == {"rank": 0}
            assert hvd.broadcast_object_fn(size - 1, raw, "fn")(rank) == size - 1
            assert hvd.allgather_object(rank, session=raw) == list(range(size))
            together = weights(raw)
    assert np.abs(alone - start).max() > 0.01, "training did nothing"
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    everyone = hvd.allgather_object(together.tobytes())
    assert all(theirs == everyone[0] for theirs in everyone)

# Clipped between the two halves of minimize(), and started without a hook.
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    results = []
    for seed, rows, wrap in (0, slice(None), lambda o: o), (
        rank, slice(rank, None, size), hvd.DistributedOptimizer
    ):
        with tf.compat.v1.variable_scope(f"model{len(results)}"):
            loss, opt, step = model(optimizers["Adam"], seed, rows)
            opt = wrap(tf.compat.v1.train.GradientDescentOptimizer(0.1))
            gradients, variables = zip(*opt.compute_gradients(
                loss, tf.compat.v1.trainable_variables(f"model{len(results)}")
            ))
            clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
            with hvd.local_fit():
                train_op = opt.apply_gradients(zip(clipped, variables))
            results.append((train_op, norm, variables))
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(hvd.broadcast_global_variables(0))
    (_, alone, ours), (_, together, theirs) = results
    session.run([theirs[i].assign(ours[i]) for i in range(len(ours))])
    for _ in range(2):
        a, b = session.run([alone, together])
        assert a > 0.2
        np.testing.assert_allclose(a, b, rtol=1e-4)
        session.run([results[0][0], results[1][0]])
    for a, b in session.run(list(zip(ours, theirs))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

# Unnamed collectives, in two independent branches.
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    one, two = hvd.allreduce(tf.constant(1.0 + rank)), hvd.allgather(tf.constant([rank]))
    for _ in range(3):
        mean, ranks = session.run([one, two])
        assert mean == 1 + (size - 1) / 2 and list(ranks) == list(range(size))
try:
    hvd.DistributedOptimizer(optimizers["Adam"](), backward_passes_per_step=2)
except ValueError as error:
    assert "cannot accumulate" in str(error)
else:
    raise AssertionError("accepted")
print("done")
"""

# A rank makes fewer steps. TensorFlow would try to recover forever.
ENDS_EARLY = """
import tensorflow as tf
tf.compat.v1.disable_v2_behavior()
import hvd_keras as hvd

hvd.init()
step = tf.compat.v1.train.get_or_create_global_step()
w = tf.compat.v1.get_variable("w", [3])
opt = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
train_op = opt.minimize(tf.reduce_sum(w * w), global_step=step)
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.compat.v1.train.StopAtStepHook(3 + 3 * hvd.rank())]
with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not session.should_stop():
        session.run(train_op)
print("ended after its steps")
"""

# A graph without an optimizer: each collective, its gradient, broadcasts, synchronised layers.
GRAPH = """
import time
import numpy as np
import tensorflow as tf
tf.compat.v1.disable_v2_behavior()
import hvd_keras as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
total = size * (size + 1) // 2

# Each rank fetches its gradient alone.
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    x = tf.constant([1.0, 2.0, 3.0])
    for root in range(size):
        loss = tf.reduce_sum(hvd.broadcast(x, root)) * (rank + 1)
        gradient = session.run(tf.gradients(loss, x)[0])
        np.testing.assert_array_equal(gradient, [total if rank == root else 0] * 3)
    loss = tf.reduce_sum(hvd.allgather(x)) * (rank + 1)
    np.testing.assert_array_equal(session.run(tf.gradients(loss, x)[0]), [total] * 3)

with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    session.run(hvd.broadcast_global_variables(0))  # there are none
    session.run(hvd.broadcast_variables([], 0))
    a = tf.compat.v1.get_variable("a", initializer=tf.constant([1.0, 2.0]) + rank)
    b = tf.compat.v1.get_variable("b", initializer=tf.constant([3, 4]) * (rank + 1))
    c = tf.compat.v1.get_variable("c", initializer=tf.constant(rank + 0.5))
    both = hvd.broadcast_variables([a, b], root_rank=size - 1)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(both)
    np.testing.assert_array_equal(session.run(a), [size, size + 1])
    np.testing.assert_array_equal(session.run(b), [3 * size, 4 * size])
    assert session.run(c) == rank + 0.5
    others = hvd.add_process_set([size - 1])
    if others.included():
        session.run(hvd.broadcast_variables([c], size - 1, process_set=others))

# Two layers of one name that meet in another order on each rank.
def late(values, seconds):
    def wait(x):
        time.sleep(seconds)
        return x
    out = tf.numpy_function(wait, [tf.constant(values[rank])], tf.float32)
    return tf.ensure_shape(out, values[rank].shape)

values = np.random.default_rng(1).normal(size=(2, size, 6, 3)).astype("float32")
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    normalised = []
    for i in range(2):
        layer = tf.keras.layers.BatchNormalization(synchronized=True, epsilon=1e-6)
        normalised.append(layer(late(values[i] ** (1 + i), (rank == i) * 0.5), training=True))
    session.run(tf.compat.v1.global_variables_initializer())
    for i, mine in enumerate(session.run(normalised)):
        rows = (values[i] ** (1 + i)).reshape(-1, 3)
        expected = (values[i][rank] ** (1 + i) - rows.mean(0)) / rows.std(0)
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-3)

with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    last = hvd.join()
    assert session.run(last) in range(size)
print("done")
"""


def test_scripts_of_tensorflow_1(tmp_path: pathlib.Path) -> None:
    job = run_script(tmp_path, 2, TENSORFLOW_1, forks=False, status=0)
    assert job.output.count("done") == 2, job.output


@pytest.mark.slow
def test_collectives_in_graphs_of_tensorflow_1(tmp_path: pathlib.Path) -> None:
    limits = {"HVD_TIMEOUT_SECONDS": "20", "HVD_FIRST_TIMEOUT_SECONDS": "20"}
    job = run_script(tmp_path, 2, GRAPH, forks=False, TF_USE_LEGACY_KERAS="1", **limits, status=0)
    assert job.output.count("done") == 2, job.output


@pytest.mark.slow
def test_a_rank_that_ends_early_ends_a_monitored_session(tmp_path: pathlib.Path) -> None:
    job = run_script(tmp_path, 2, ENDS_EARLY, forks=False)
    assert job.status != 0
    assert job.output.count("ended after its steps") == 1, job.output
    assert "another rank has left the job" in job.output
