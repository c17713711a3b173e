"""Scripts of one process that depend on whole batches, on the way in which they end, or on both."""

import contextlib
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

r = np.random.default_rng(0)
x = r.normal(size=(70, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def fit(name, net, optimizer, inputs=x, target=y, **options):
    """Train, and print what has come of it."""
    net.compile(optimizer, **options)
    logs = net.fit(inputs, target, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    logs = {key: np.round(value, 4).tolist() for key, value in logs.items()}
    total = round(sum(float(np.abs(w).sum()) for w in net.get_weights()), 3)
    print(name, logs, total, flush=True)  # before SIGTERM comes, where another rank is killed


class Own(keras.Sequential):
    """A model with a step of its own, by these functions of errors and of gradients."""

    def __init__(self, error, change=lambda grads: grads, last=1, norm=True):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2)]
        layers += [keras.layers.BatchNormalization()] * norm
        super().__init__([keras.Input((6,)), *layers, keras.layers.Dense(last)])
        self.error, self.change = error, change

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.error(self(x, training=True), y)
        grads = self.change(tape.gradient(loss, self.trainable_variables))
        pairs = list(zip(grads, self.trainable_variables, strict=True))

        def update():
            self.optimizer.apply_gradients(pairs)
            return 0

        tf.cond(tf.math.is_finite(loss), update, lambda: 0)
        return {"error": loss}


def mse(z, y):
    return tf.reduce_mean((z - y) ** 2)


def masked(z, y):
    mask = tf.nn.relu(y)
    return tf.reduce_sum(mask * z**2) / tf.reduce_sum(mask)


def pairs(z, y):
    return tf.reduce_mean(tf.matmul(z, z, transpose_b=True) ** 2)


def steps():
    """Gradients that are clipped, masks, losses that compare rows, steps that are skipped."""
    fit("clip", Own(mse, lambda g: tf.clip_by_global_norm(g, 0.1)[0]), "adam")
    fit("mask", Own(masked), "sgd")
    fit("spread", Own(lambda z, y: mse(z, y) + tf.math.reduce_std(z - y)), "sgd")
    fit("pairs", Own(pairs, last=3), "sgd")
    fit("shapes", Own(lambda z, y: tf.reduce_mean((z[:, 0] - y) ** 2)), "sgd")  # [B, B], by mistake
    holes = np.where(np.arange(70)[:, None] == 20, np.nan, x)
    fit("skip", Own(mse, norm=False), "sgd", inputs=holes)
    noise = lambda z, y: mse(z + tf.random.normal(tf.shape(z)), y)  # noqa: E731
    fit("noise", Own(noise), "sgd")
    layers = keras.layers.Dense(4), keras.layers.UnitNormalization()
    net, classes = keras.Sequential([keras.Input((6,)), *layers]), r.integers(0, 4, size=70)
    if hasattr(keras.losses, "Circle"):  # Keras 3.6 has none
        fit("circle", net, keras.optimizers.SGD(0.05), target=classes, loss=keras.losses.Circle())
    print("predict", np.round(net.predict(x, batch_size=9, verbose=0)[::9], 3).tolist())
    keras.mixed_precision.set_global_policy("mixed_float16")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**18)
    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    fit("half", net, scaled, target=30 * y, loss="mse")
    print("scale", float(scaled.dynamic_scale))
    keras.mixed_precision.set_global_policy("float32")


class Trainer:
    """A loop of the script's own, by a method."""

    def __init__(self, net):
        self.net, self.optimizer = net, keras.optimizers.Adam(0.01)

    @tf.function
    def step(self, x, y, *, weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.net(x, training=True) - y) ** 2) * weight
        grads, norm = tf.clip_by_global_norm(tape.gradient(loss, self.net.trainable_variables), 0.5)
        self.optimizer.apply_gradients(zip(grads, self.net.trainable_variables, strict=True))
        return {"loss": loss, "norm": norm}


def loop():
    """Own loops, an eager tape, a step that fails, on each rank, after which the script goes on."""
    net = Own(mse)
    trainer, found = Trainer(net), []
    for batch in tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70, seed=1).batch(16):
        found += [float(v) for v in trainer.step(*batch, weight=0.5).values()]
    print("loop", np.round(found, 4).tolist())
    with tf.GradientTape() as tape:
        loss = mse(tf.function(lambda rows: net(rows))(x), y)
    grads = tape.gradient(loss, net.trainable_variables)
    print("tape", np.round([np.abs(g).sum() for g in grads], 4).tolist())
    total = tf.function(lambda rows, by: tf.reduce_sum(by(rows)))
    print("calls", [float(total(x, lambda rows, k=k: rows * k)) for k in (1, 2, 3)])
    keras.utils.set_random_seed(3)
    layers = keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(1)
    net = keras.Sequential(layers)
    words = r.integers(0, 9, size=(70, 6))
    fit("words", net, "sgd", inputs=words, loss="mse")
    for row in 0, 15:
        bad = words.copy()
        bad[row] = 9
        try:
            net.fit(bad, y, batch_size=16, verbose=0)
        except tf.errors.InvalidArgumentError as error:
            print("caught", "is not in [0, 9)" in str(error))
        fit("words", net, "sgd", inputs=words, loss="mse")


def exits():
    fit("exits", Own(mse), "sgd", run_eagerly=True)
    sys.exit(3)


def leaves():
    fit("leaves", Own(mse), "sgd")
    sys.stdout.flush()
    os._exit(4)


def fails():
    fit("fails", Own(mse), "sgd")
    raise KeyError("of the script")


def chooses():
    """Train with another Keras than the imported one."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    print("chooses", flush=True)
    fit("chooses", Own(mse), "sgd")


def kills():
    """Kill the other rank between two steps."""
    net = Own(mse)
    fit("kills", net, "sgd")
    me = pathlib.Path("/proc/self/cmdline").read_bytes()
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if int(path.parent.name) != os.getpid() and path.read_bytes() == me:
                os.kill(int(path.parent.name), signal.SIGKILL)
    fit("kills", net, "sgd")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
