"""Scripts for tf_keras run with only the import changed.

In separate jobs, because a process has one Keras.
"""

import pathlib

import pytest

from tests.harness.ranks import run_script

# Scripts of tf_keras, to which tf.keras must refer. Each part is a job that begins with this.
TF_KERAS = """
import sys
import numpy as np
import tensorflow as tf
import hvd_keras as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
optimizers, layers = tf.keras.optimizers, tf.keras.layers
assert tf.keras.Model.__module__.startswith("tf_keras")
B, STEPS = 4, 5
random = np.random.default_rng(5)
x = random.normal(size=(STEPS, size, B, 6)).astype("float32")
y = random.normal(size=(STEPS, size, B, 1)).astype("float32")
words = random.integers(0, 20, (STEPS, size, B, 3))
everything = [a.reshape(STEPS * size * B, -1) for a in (x, words, y)]
share = [a[:, rank].reshape(STEPS * B, -1) for a in (x, words, y)]

def make_model(seed, *, synchronized=None, policy="float32"):
    features, tokens = tf.keras.Input((6,)), tf.keras.Input((3,))
    hidden = layers.Dense(5, activation="tanh", dtype=policy)(features)
    if synchronized is not None:
        hidden = layers.BatchNormalization(synchronized=synchronized)(hidden)
    embedded = layers.Flatten()(layers.Embedding(20, 2)(tokens))
    out = layers.Dense(1, dtype="float32")(layers.Concatenate()([hidden, embedded]))
    model = tf.keras.Model([features, tokens], out)
    random = np.random.default_rng(seed)
    # Squared, for there may be variances among them.
    model.set_weights([random.normal(size=w.shape, scale=0.3) ** 2 for w in model.get_weights()])
    return model

def flat(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])

def train(model, optimizer, data, batch, callbacks=(), epochs=2, metrics=(), **options):
    model.compile(optimizer=optimizer, loss="mse", metrics=list(metrics),
                  experimental_run_tf_function=False,
                  run_eagerly=options.pop("run_eagerly", False))
    x, words, y = data
    y = (y > 0).astype("float32") if options.pop("binary", False) else y
    return model.fit([x, words], y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0,
                     callbacks=list(callbacks), **options)
"""

TF_KERAS_PARTS = {
    "optimizers": """
def check(make_optimizer, synchronized=None):
    # One process normalises over its batch, which is the whole one.
    alone = make_model(0, synchronized=False if synchronized else None)
    start = flat(alone)
    train(alone, make_optimizer(), everything, size * B)
    together = make_model(rank, synchronized=synchronized)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    train(together, hvd.DistributedOptimizer(make_optimizer()), share, B, [broadcast])
    assert np.abs(flat(alone) - start).max() > 0.005, "training did nothing"
    np.testing.assert_allclose(flat(together), flat(alone), rtol=1e-4, atol=1e-5)
    everyone = hvd.allgather_object(flat(together).tobytes())
    assert all(theirs == everyone[0] for theirs in everyone)

check(lambda: optimizers.Adam(0.05, global_clipnorm=0.5))
check(lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3, use_ema=True))
check(lambda: optimizers.legacy.Adam(0.05, clipnorm=0.1))
check(lambda: optimizers.SGD(0.05), synchronized=True)

# compute_gradients returns gradients over all ranks, which are not exchanged again.
def three_steps(kind, compute, change=lambda pairs: pairs, passes=1, **arguments):
    v = tf.Variable([0.0])
    opt = hvd.DistributedOptimizer(kind(1.0), op=op, backward_passes_per_step=passes)
    for _ in range(3):
        with tf.GradientTape() as tape:
            y = v * (rank + 1.0)
        opt.apply_gradients(change(compute(opt)(y, [v], tape=tape)), **arguments)
    return float(v[0])

def halved(pairs):
    assert float(pairs[0][0][0]) == total / (1 if op is hvd.Sum else size), pairs
    return [(g / 2, v) for g, v in pairs]

total = size * (size + 1) / 2
public, private = lambda o: o.compute_gradients, lambda o: o._compute_gradients
for op in (hvd.Average, hvd.Sum):
    one = -3 * total / (1 if op is hvd.Sum else size)
    for skip in (True, False):
        new, old = optimizers.SGD, optimizers.legacy.SGD
        for compute in (public, private):
            assert three_steps(new, compute, skip_gradients_aggregation=skip) == one
            assert three_steps(new, compute, halved, skip_gradients_aggregation=skip) == one / 2
        arguments = {"experimental_aggregate_gradients": not skip}
        assert three_steps(old, private, **arguments) == one
        assert three_steps(old, private, halved, **arguments) == one / 2
    for kind in (optimizers.SGD, optimizers.legacy.SGD):
        opt, v = hvd.DistributedOptimizer(kind(1.0), op=op), tf.Variable([0.0])
        for _ in range(3):
            opt.minimize(lambda: v * (rank + 1.0), [v])
        assert float(v[0]) == one, (kind, v)
op = hvd.Average
summed = three_steps(new, private, passes=3, skip_gradients_aggregation=True)
assert summed == -3 * total / size, summed
print("done")
""",
    "callbacks": """
# All callbacks: one log for all ranks, and it is that of one process.
alone, together = make_model(0), make_model(rank)
kinds = tf.keras.metrics
def metrics():
    return ["mae", kinds.AUC(name="auc"), kinds.RootMeanSquaredError()]

plan = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** epoch)
expected = train(alone, optimizers.SGD(0.1, momentum=0.9), everything, size * B, [plan],
                 binary=True, metrics=metrics(), validation_data=(
                     [everything[0][::2], everything[1][::2]], everything[2][::2] > 0)).history
path = f"{sys.argv[0]}.keras"
average = hvd.callbacks.MetricAverageCallback()
history = train(
    together, hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9)), share, B,
    [hvd.callbacks.BroadcastGlobalVariablesCallback(0), average,
     hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** epoch),
     hvd.callbacks.ModelCheckpoint(path, monitor="val_loss", mode="min")],
    binary=True, metrics=metrics(), validation_data=(
        [everything[0][::2][rank::size], everything[1][::2][rank::size]],
        everything[2][::2][rank::size] > 0)).history
assert history.keys() == expected.keys() and len(history) == 9, history.keys()
for key in history:
    np.testing.assert_allclose(history[key], expected[key], rtol=1e-4, err_msg=key)
data = [everything[0][rank::size], everything[1][rank::size]], everything[2][rank::size] > 0
results = together.evaluate(*data, callbacks=[average], verbose=0)
np.testing.assert_allclose(
    results, alone.evaluate(everything[:2], everything[2] > 0, verbose=0), rtol=1e-4)

# Training goes on from the file, with the optimizer's state.
loaded = hvd.load_model(path)
for model in loaded, together:
    model.fit(share[:2], share[2], batch_size=B, shuffle=False, verbose=0)
np.testing.assert_allclose(flat(loaded), flat(together), rtol=1e-5)
assert np.abs(flat(loaded) - flat(alone)).max() > 0.01

warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=1)
rates = []
see = tf.keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: rates.append(float(loaded.optimizer.learning_rate)))
loaded.fit(share[:2], share[2], batch_size=B, verbose=0, callbacks=[warmup, see])
np.testing.assert_allclose(rates, 0.2 * (1 + np.arange(1, 6) / 5 * (size - 1)) / size, rtol=1e-5)

# Both families broadcast the rate, correct the momentum alike, and commit the rate.
from hvd_keras.horovod import elastic
found = []
for family in optimizers, optimizers.legacy:
    net = tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(1, kernel_initializer="ones")])
    data, how = (share[0], share[2]), {"batch_size": B, "shuffle": False, "verbose": 0}
    halved = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** epoch, 1)
    opt = hvd.DistributedOptimizer(family.SGD(0.1 * (1 + rank), momentum=0.9))
    opt.gradient_accumulation_steps = 1  # as optimizers of packages have it
    net.compile(opt, "mse")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    net.fit(*data, epochs=3, callbacks=[broadcast, halved], **how)
    found.append(hvd.allgather(flat(net)[np.newaxis]).numpy())
    opt = hvd.DistributedOptimizer(family.Adam(0.1))
    net.compile(opt, "mse")
    net.fit(*data, **how)  # without the callback; the weights are equal
    state = elastic.KerasState(net)
    opt.learning_rate.assign(0.3)
    state.restore()
    np.testing.assert_allclose(float(opt.learning_rate), 0.1, rtol=1e-6)
np.testing.assert_array_equal(found[0][0], found[0][1])
np.testing.assert_allclose(*found, rtol=1e-5)

# A step of one's own divides what a loss adds up. AutoGraph converts losses, as in tf_keras.
class Divides(tf.keras.Sequential):
    def train_step(self, data):
        a, b = data
        with tf.GradientTape() as tape:
            loss = self.mean(b, self(a, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}

    def mean(self, y, y_pred):
        return tf.reduce_mean(of_rows(y, y_pred))

class OfCompile(Divides):
    def mean(self, y, y_pred):
        return tf.reduce_mean(self.compiled_loss(y, y_pred))

class WithoutAName(tf.keras.losses.Loss):  # of which rows are no mean
    def call(self, y, y_pred):
        return tf.reduce_sum(tf.square(y - y_pred)) / (1.0 + tf.reduce_sum(tf.square(y)))

def branches(y, y_pred):
    errors = tf.reduce_mean(tf.square(y - y_pred), -1)
    if tf.reduce_max(errors) > 1e9:
        errors = 0.0 * errors
    return errors

of_rows = tf.keras.losses.MeanSquaredError(reduction="none")
for kind, loss in ((Divides, None), (OfCompile, of_rows), (tf.keras.Sequential, branches),
                   (tf.keras.Sequential, WithoutAName())):
    found = []
    for opt, data, batch in ((optimizers.SGD(0.1), everything, size * B),
                             (hvd.DistributedOptimizer(optimizers.SGD(0.1)), share, B)):
        net = kind([tf.keras.Input((6,)), layers.Dense(1, kernel_initializer="ones")])
        net.compile(opt, loss)
        net.fit(data[0], data[2], batch_size=batch, shuffle=False, verbose=0)
        found.append(flat(net))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)

# A masked loss is divided by a number that differs by rank, also in validation.
tokens = np.maximum(words, 1)
tokens[:, 1:, :, 1:] = 0
targets = np.repeat(y, 3, -1)[..., np.newaxis]
tokens, targets = (np.asarray(a).swapaxes(0, 1) for a in (tokens, targets))
def validated(optimizer, mine, batch, callbacks):
    model = tf.keras.Sequential([tf.keras.Input((3,)), layers.Embedding(20, 2, mask_zero=True),
                                 layers.Dense(1)])
    random = np.random.default_rng(1)
    model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
    model.compile(optimizer, "mse")
    a, b = (part[mine].swapaxes(0, 1).reshape(-1, *part.shape[3:]) for part in (tokens, targets))
    logs = model.fit(a, b, batch_size=batch, epochs=2, shuffle=False, verbose=0,
                     callbacks=callbacks, validation_data=(a, b), validation_batch_size=batch)
    loss = model.evaluate(a, b, batch_size=batch, verbose=0, callbacks=callbacks)
    return [*logs.history["loss"], *logs.history["val_loss"], loss]

together = validated(hvd.DistributedOptimizer(optimizers.SGD(0.05)), slice(rank, rank + 1), B,
                     [average])
with hvd.local_fit():
    alone = validated(optimizers.SGD(0.05), slice(None), size * B, [])
np.testing.assert_allclose(together, alone, rtol=1e-4)

# An overflow on one rank: no rank makes the step.
for family in optimizers, optimizers.legacy:
    model = make_model(rank, policy="mixed_float16")
    model.compile(optimizer=tf.keras.mixed_precision.LossScaleOptimizer(
        hvd.DistributedOptimizer(family.SGD(0.1))), loss="mse")
    data = [np.float32(a[:B]) for a in share]
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data[:2], data[2], batch_size=B, verbose=0, callbacks=[broadcast])
    before, scale = flat(model), float(model.optimizer.loss_scale)
    everyone = hvd.allgather_object(before.tobytes())
    assert all(theirs == everyone[0] for theirs in everyone)
    if rank == size - 1:
        data[2] = data[2] * np.inf
    model.fit(data[:2], data[2], batch_size=B, verbose=0)
    assert (flat(model) == before).all() and float(model.optimizer.loss_scale) == scale / 2
print("done")
""",
    "steps": """
# Local steps are added up, or averaged, before the ranks exchange them; also eagerly.
accumulated = [
    (lambda: optimizers.Adagrad(0.05), False, False),
    (lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3), True, True),
    (lambda: optimizers.legacy.RMSprop(0.01, momentum=0.5), True, False),
]
for make_optimizer, averages, eagerly in accumulated:
    alone, optimizer, sums = make_model(0), make_optimizer(), None
    for number in range(2 * STEPS):
        rows = slice(number % STEPS * size * B, (number % STEPS + 1) * size * B)
        a, b, c = (part[rows] for part in everything)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((alone([a, b]) - c) ** 2)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, alone.trainable_variables))
        sums = [s + g for s, g in zip(sums, gradients)] if sums else list(gradients)
        if number % 2:
            sums = [s / 2 if averages else s for s in sums]
            optimizer.apply_gradients(zip(sums, alone.trainable_variables))
            sums = None
    together = make_model(rank)
    optimizer = hvd.DistributedOptimizer(make_optimizer(), backward_passes_per_step=2,
                                         average_aggregated_gradients=averages)
    train(together, optimizer, share, B, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
          run_eagerly=eagerly)
    np.testing.assert_allclose(flat(together), flat(alone), rtol=1e-4, atol=1e-5)
    assert int(optimizer.iterations) == 2 * STEPS
scaled = tf.keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(0.1))
try:
    train(make_model(0, policy="mixed_float16"),
          hvd.DistributedOptimizer(scaled, backward_passes_per_step=2), share, B)
except ValueError as error:
    assert "LossScaleOptimizer of tf_keras cannot accumulate" in str(error)
else:
    raise AssertionError("accepted")

# Data of every kind for fit.
inputs = np.random.default_rng(5).normal(size=(8 * size, 3))
targets = inputs.sum(1, keepdims=True)

class Batches(tf.keras.utils.Sequence):
    def __len__(self):
        return 2 * size

    def __getitem__(self, index):
        mine = slice(4 * index, 4 * index + 4)
        return inputs[mine].astype("float32"), targets[mine]

def trained(opt, data, **arguments):
    # Keras makes the weights in fit.
    net = tf.keras.Sequential([layers.Dense(1, kernel_initializer="ones")])
    net.compile(opt, "mse")
    net.fit(data, epochs=2, verbose=0, **arguments)
    return np.concatenate([w.ravel() for w in net.get_weights()])

with hvd.local_fit():
    alone = trained(optimizers.SGD(0.1), inputs, y=targets, batch_size=4 * size, shuffle=False)
for data in (
    hvd.data.shard((inputs, targets), batch_size=4, shuffle=False),
    hvd.data.shard(Batches(), shuffle=False),
    hvd.data.shard(
        tf.data.Dataset.from_tensor_slices((inputs, targets)), batch_size=4, shuffle=False
    ),
    hvd.data.shard((inputs, targets), batch_size=4, shuffle=False, uneven="pad"),
):
    share = trained(hvd.DistributedOptimizer(optimizers.SGD(0.1)), data)
    np.testing.assert_allclose(share, alone, rtol=1e-5)
assert hvd.data.agree_on_steps(Batches()) == 2 * size

# A custom loop, in which a rank lacks a gradient, and one that is dense there and sparse here.
v, w, u = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2])), tf.Variable(5.0)
for wrapped in (optimizers.SGD(1.0), optimizers.legacy.SGD(1.0)):
    for variable, value in (v, [1.0, 2.0]), (w, tf.ones([3, 2])), (u, 5.0):
        variable.assign(value)
    opt = hvd.DistributedOptimizer(wrapped, op=hvd.Sum)
    opt.register_local_var(u)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(w, [rank, 2])) + u * rank
        if rank == 0:
            loss += tf.reduce_sum(v * [1.0, 3.0])
    opt.apply_gradients(zip(tape.gradient(loss, [v, w, u]), [v, w, u]))
    np.testing.assert_allclose(v, [0.0, -1.0])
    np.testing.assert_allclose(w[:, 0], [0.0, 0.0, -1.0])
    np.testing.assert_allclose(u, 5.0 - rank / size)

# Clipping that would tell the ranks apart: by a norm of own gradients, and by each rank's rows.
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(v) + u * rank
opt = hvd.DistributedOptimizer(optimizers.SGD(1.0, global_clipnorm=1.0))
opt.register_local_var(u)
try:
    opt.apply_gradients(zip(tape.gradient(loss, [v, u]), [v, u]))
except ValueError as error:
    assert "belongs to this rank alone" in str(error) and "Use clipnorm" in str(error), error
else:
    raise AssertionError("global_clipnorm")

class Clipped(tf.keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = Clipped.total((self(data[0], training=True) - data[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.clip_by_norm(g, 0.1) for g in gradients] if self.clips else gradients
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

from hvd_keras.runtime import log
told = []
log.warn_once = told.append
mean, total = tf.reduce_mean, tf.reduce_sum
for Clipped.clips, eager, Clipped.total in (
    (False, False, mean), (True, False, mean), (False, True, mean), (True, True, mean),
    (False, False, total),
):
    told.clear()
    net = Clipped([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    net.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1)), "mse", run_eagerly=eager)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    data = hvd.data.shard((inputs, targets), batch_size=4)
    net.fit(data, verbose=0, callbacks=[broadcast])
    found = [text for text in told if "gradients are changed" in text]
    assert bool(found) == (Clipped.clips and rank == 0), (eager, told)
    found = [text for text in told if "adds up the rows" in text]
    assert bool(found) == (Clipped.total is total and rank == 0), told

def fails(error, text, *args, make=hvd.DistributedOptimizer, **kwargs):
    try:
        make(*args, **kwargs)
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(text)

import keras
fails(TypeError, "unset it", keras.optimizers.SGD())
fails(ValueError, "distributed already", opt)
fails(ValueError, "it needs an optimizer of Keras 3", optimizers.SGD(), shard_state=True)
for make in (hvd.callbacks.Checkpoint, lambda path: hvd.layers.Embedding(9, 3, shard="rows")):
    fails(ValueError, "needs Keras 3, but tf_keras is in use", "state", make=make)
# On a process set, with compression.
some = hvd.add_process_set([0])
if rank == 0:
    net = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    before = net.get_weights()[0]
    how = {"process_set": some, "compression": hvd.Compression.fp16}
    net.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1), **how), "mse")
    verify = hvd.callbacks.VerifyWeights(1)
    net.fit(inputs, targets, verbose=0, callbacks=[broadcast, verify])
    assert (net.get_weights()[0] != before).all()
print("done")
""",
}


SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in ("optimizers", "callbacks")]


@pytest.mark.parametrize("part", [*SLOW, "steps"])
def test_scripts_of_tf_keras(part: str, tmp_path: pathlib.Path) -> None:
    script = TF_KERAS + TF_KERAS_PARTS[part]
    # References are trained without the other ranks.
    settings = {"TF_USE_LEGACY_KERAS": "1", "HVD_STRICT": "0"}
    job = run_script(tmp_path, 2, script, forks=False, **settings, status=0)
    assert job.output.count("done") == 2, job.output
