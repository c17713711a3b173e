"""Ways to train of scripts of one process; prints what each of them logs, and its weights."""

import contextlib
import functools
import gc
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import weakref

import auto_steps
import h5py
import keras
import numpy as np
import tensorflow as tf

seen = []  # how many rows each call has had


class Counted(keras.layers.Layer):
    """Counts the rows, by Python code in a step."""

    def call(self, x):
        tf.py_function(lambda rows: seen.append(int(rows)), [tf.shape(x)[0]], [])
        return x


def rows(x):
    return tf.shape(x)[0]


def model(*last, loss="mse", norm=False, **options):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, "tanh"),
        keras.layers.Dropout(0.3),
        keras.layers.GaussianNoise(0.1),
    ]
    layers += [keras.layers.BatchNormalization()] * norm
    made = keras.Sequential([Counted(), *layers, *(last or [keras.layers.Dense(1)])])
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, **options)
    return made


def show(name, model, logs):
    logs = {key: np.round(value, 4).tolist() for key, value in sorted(logs.items())}
    print(name, logs, round(sum(float(np.abs(w).sum()) for w in model.get_weights()), 2))


random = np.random.default_rng(0)
x = random.normal(size=(70, 6)).astype("float32")
y = (x[:, :1] > x[:, 1:2]).astype("float32")
weights = random.uniform(size=70)


def arrays():
    """Short last batches, validation, weights, metrics that are no means; a model is freed."""
    print("collects", gc.isenabled(), gc.get_threshold())
    metrics = ["mae", keras.metrics.R2Score(), Peak(), rmse]
    net = model(norm=True, metrics=metrics, weighted_metrics=["mse"])
    fit = net.fit(x, y, 23, 2, sample_weight=weights, validation_split=0.3, verbose=0)
    show("arrays", net, fit.history)
    print(
        "evaluate",
        np.round(net.evaluate(x, y, 9, verbose=0), 4),
        net.predict(x, 23, verbose=0).sum(),
    )
    logs = [net.train_on_batch(x[:k], y[:k]) for k in (1, 5)] + [net.test_on_batch(x[:3], y[:3])]
    print("batches", np.round(logs, 4).tolist(), net.predict_on_batch(x[:3]).shape)
    dropped = weakref.ref(net)
    del net, fit
    keras.utils.clear_session()
    gc.collect()
    print("freed", dropped() is None)


def rmse(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean((y_true - y_pred) ** 2))


class Peak(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self):
        super().__init__(name="peak")
        self.top = self.add_weight(name="top", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.top.assign(tf.maximum(self.top, tf.reduce_sum(y_pred)))

    def result(self):
        return self.top


def sources():
    """Shuffled, filtered and infinite datasets, a generator, a PyDataset, class weights."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return x[i * 14 : (i + 1) * 14 - i], y[i * 14 : (i + 1) * 14 - i]

    net = model(loss="binary_crossentropy", metrics=["accuracy"], steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70)
    few = data.filter(lambda x, y: x[0] > 0).batch(7)
    batches = ((x[i : i + 9], y[i : i + 9]) for i in range(0, 70, 9))
    for name, source, options in (
        ("tf.data", data.batch(15), {"validation_data": few, "class_weight": {0: 1.0, 1: 3.0}}),
        ("infinite", data.batch(15).repeat(), {"steps_per_epoch": 4}),
        ("generator", batches, {}),
        ("PyDataset", Batches(), {}),
    ):
        show(name, net, net.fit(source, verbose=0, **options).history)


def masks():
    """A mask, and Keras's own words for several devices."""
    texts = random.integers(0, 9, size=(41, 7))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    embedding = keras.layers.Embedding(9, 4, mask_zero=True)
    net = keras.Sequential(
        [embedding, keras.layers.LSTM(5, return_sequences=True), keras.layers.Dense(9)]
    )
    net.compile("sgd", loss, metrics=["accuracy"])
    show("mask", net, net.fit(texts, texts, 10, verbose=0).history)
    if not keras.__version__.startswith("3.6."):  # on which TensorFlow's backend lacks a function
        words()


def words():
    """Keras's own words for several devices, of which one process has one."""
    parallel = keras.distribution.DataParallel()
    keras.distribution.set_distribution(parallel)
    assert keras.distribution.distribution() is parallel
    net = model()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    show("words", net, net.fit(data, validation_data=data, verbose=0).history)
    keras.distribution.set_distribution(None)


def tables():
    """Tables that are larger than the rows of a batch, of which some repeat; one is frozen."""
    words = random.integers(-40, 40, (70, 7)) % 3000  # few, the last ones too
    for optimizer in ("sgd", "adam", keras.optimizers.SGD(0.1, momentum=0.5, clipnorm=0.1)):
        keras.utils.set_random_seed(1)
        word = keras.Input((7,), dtype="int32")
        frozen = keras.layers.Embedding(3000, 4, trainable=False)(word)
        both = keras.layers.Concatenate()([keras.layers.Embedding(3000, 8)(word), frozen])
        top = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(both))
        net = keras.Model(word, top)
        net.compile(optimizer, "mse", metrics=["mae"])
        fit = net.fit(words, y, 23, 2, validation_split=0.2, verbose=0)
        show("tables", net, fit.history)
        print("rows", net.predict(words, 23, verbose=0).sum())


class Pair(keras.Model):
    """Two models and two optimizers, as a GAN has them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = keras.layers.Dense(6), keras.layers.Dense(1)
        self.error = keras.metrics.Mean(name="error")

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            real, fake = self.two(x), self.two(self.one(x))
            loss = tf.reduce_mean((real - y) ** 2) + tf.reduce_mean(fake**2)
        gradients = tape.gradient(loss, self.two.trainable_weights)
        self.first.apply_gradients(zip(gradients, self.two.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            error = tf.reduce_mean((self.two(self.one(x)) - 1) ** 2)
        gradients = tape.gradient(error, self.one.trainable_weights)
        self.second.apply_gradients(zip(gradients, self.one.trainable_weights, strict=True))
        self.error.update_state(error)
        return {"loss": loss, "error": self.error.result()}


def custom():
    """A custom step whose logs are a metric's."""
    keras.utils.set_random_seed(1)
    net = Pair()
    net.compile(keras.optimizers.SGD(0.05), keras.optimizers.Adam(0.01))
    found = []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(logs))
    history = net.fit(x, y, batch_size=23, epochs=2, verbose=0, callbacks=[look]).history
    show("custom", net, {"error": history["error"], "loss": [float(one["loss"]) for one in found]})
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    net.compile("sgd", "mse", jit_compile=True)
    show("XLA", net, net.fit(x, y, batch_size=10, verbose=0).history)
    bags = tf.RaggedTensor.from_row_lengths(x, [1, 2, 3, 4] * 7)
    net = model()
    net = keras.Sequential([Bag(), *net.layers])
    net.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((bags, y[:28])).batch(5)
    show("ragged", net, net.fit(data, verbose=0).history)


class Bag(keras.layers.Layer):
    def call(self, x):
        return tf.reduce_mean(x, 1)


class Own(keras.Model):
    """A step that no part of its batch can make alone; it counts what it has seen."""

    def __init__(self, loss, **options):
        super().__init__()
        self.dense, self.own_loss = keras.layers.Dense(3), loss
        self.mean = self.add_weight(shape=(6,), trainable=False, initializer="zeros")
        self.compile(keras.optimizers.SGD(0.01), **options)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(self.dense(x), y)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.mean.assign(0.99 * self.mean + 0.01 * tf.reduce_mean(x, 0))
        return {"loss": loss}

    def predict_step(self, data):
        return self(data) - tf.reduce_mean(self(data))


class Adds(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.01 * tf.reduce_sum(inputs**2))
        return inputs


def spread(y, z):
    return tf.reduce_sum((z - tf.reduce_mean(z, 0) - y) ** 2, -1)


class Spread(keras.losses.Loss):
    def call(self, y, z):
        return spread(y, z)


def contrast(z, y):
    return tf.reduce_mean((z @ tf.transpose(z)) ** 2)


def fit_whole(name, loss, options):
    keras.utils.set_random_seed(1)
    net = Own(loss, **options)
    show(name, net, net.fit(x[:60], y[:60], 12, 2, verbose=0).history)
    print(name, np.round(net.predict(x, 12, verbose=0)[::9], 4).tolist())


def whole():
    """Steps that cannot be divided: sums, fixed numbers of rows, own variables."""

    def classes(z, y):
        loss = keras.losses.sparse_categorical_crossentropy(tf.range(12), z @ tf.transpose(z))
        return tf.reduce_mean(loss)

    for name, loss, options in (
        ("total", lambda z, y: tf.reduce_sum(z**2), {}),
        ("fixed", classes, {}),
        ("variable", lambda z, y: tf.reduce_mean(z**2), {}),
        ("eager", contrast, {"run_eagerly": True}),
        ("order", lambda z, y: tf.reduce_mean(z * tf.random.shuffle(z, seed=3) * 0), {}),
    ):
        fit_whole(name, loss, options)
    net = model(loss=Spread())
    show("loss", net, net.fit(x, y, 12, 2, verbose=0).history)
    longer = tf.data.Dataset.from_tensor_slices(x).batch(10)
    shorter = tf.data.Dataset.from_tensor_slices(x[::2]).batch(5)
    net = Own(lambda z, y: tf.reduce_mean(z**2) + tf.reduce_mean(y))
    show("lengths", net, net.fit(tf.data.Dataset.zip(longer, shorter), verbose=0).history)
    keras.utils.set_random_seed(1)
    first = keras.layers.LSTM(4, stateful=True, name="stateful")
    net = keras.Sequential([keras.Input(batch_shape=(10, 6, 1)), first, keras.layers.Dense(1)])
    net.compile("adam", "mse")
    fit = net.fit(x[..., None], y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    show("stateful", net, fit.history)
    print("stateful", net.predict(x[..., None], batch_size=10, verbose=0).sum())


def more():
    """More of them: pairs of rows, noise of a fixed shape, a metric, a layer's loss."""
    fit_whole("pairs", contrast, {})
    noise = functools.partial(tf.random.normal, (12, 3), seed=3)
    fit_whole("noise", lambda z, y: tf.reduce_mean(z + noise() * 0), {})
    net = model(loss="mse", metrics=[spread])
    show("metric", net, net.fit(x, y, 12, 2, verbose=0).history)
    net = model(keras.layers.Dense(1), Adds())
    show("add_loss", net, net.fit(x, y, 20, verbose=0).history)


class Interrupted(keras.callbacks.Callback):
    """Fails once, in the third epoch."""

    is_over = False

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and not self.is_over:
            self.is_over = True
            raise KeyError("interrupted")


def files():
    """What a script makes, moves and removes, and what it saves under names of its own."""
    os.makedirs("results/of an earlier run")
    with open("results/lines", "w") as file:
        file.write("earlier\n")
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.weights.h5")
        options = {"monitor": "loss", "save_best_only": True, "save_weights_only": True}
        callbacks, net = keras.callbacks.ModelCheckpoint(best, **options), model()
        net.fit(x, y, 20, callbacks=callbacks, verbose=0)
        net.load_weights(best)
        net.save(os.path.join(folder, "net.keras"))
        kinds = {"Counted": Counted}
        net = keras.models.load_model(os.path.join(folder, "net.keras"), custom_objects=kinds)
    if os.path.exists("results"):
        shutil.rmtree("results")
    os.makedirs("results/parts")
    callbacks = [keras.callbacks.BackupAndRestore("backup"), Interrupted()]
    for _ in range(2):
        try:
            show("files", net, net.fit(x, y, 20, 4, callbacks=callbacks, verbose=0).history)
        except KeyError as error:
            print(error)
    net.save_weights("results/parts/net.weights.h5")
    shutil.move("results/parts/net.weights.h5", "results/net.weights.h5")
    os.rmdir("results/parts")
    os.rename("results/net.weights.h5", "results/moved.weights.h5")
    net.load_weights("results/moved.weights.h5")
    print(sorted(os.listdir("results")), net.predict(x, 20, verbose=0).sum())
    np.savetxt("results/text", [1.5])
    assert np.loadtxt("results/text") == 1.5
    for number in range(1, 10):  # whole at every moment
        with open("results/state.part", "w") as file:
            json.dump([*range(number)], file)
        os.replace("results/state.part", "results/state.json")
        with open("results/state.json") as file:
            assert len(json.load(file)) == number
    with open("results/lines", "a") as file:
        file.write("line\n")
    with open("w", "w") as file:
        file.write("w")
    libraries()
    print("to stderr", file=sys.stderr)


def libraries():
    """Files that libraries write without Python's open."""
    rows = np.random.default_rng(1).normal(size=100_000)
    with h5py.File("results/rows.h5", "w") as file:
        file["rows"] = rows
    with h5py.File("results/rows.h5", "a") as file:
        file["twice"] = 2 * rows
    with h5py.File("results/rows.h5") as file:
        print("hdf5", file["twice"][:].sum())
    with tf.io.TFRecordWriter(path="results/rows.tfrecord") as file:
        for row in rows[:2000]:
            file.write(row.tobytes())
    print("records", sum(1 for _ in tf.data.TFRecordDataset("results/rows.tfrecord")))
    tf.io.gfile.makedirs("results/gfile/here")
    with tf.io.gfile.GFile("results/gfile/here/text", "w") as file:
        file.write(str(rows[0]))
    tf.io.write_file(
        filename="results/text.txt", contents=tf.io.read_file("results/gfile/here/text")
    )
    with open("results/text.txt") as file:
        print("text", file.read())
    os.symlink("text.txt", "results/link")
    for _ in range(2):
        with contextlib.closing(sqlite3.connect("results/rows.db")) as data:
            data.execute("CREATE TABLE IF NOT EXISTS rows (a REAL)")
            data.executemany("INSERT INTO rows VALUES (?)", [(row,) for row in rows[:50]])
            data.commit()
            print("sqlite", data.execute("SELECT COUNT(*), SUM(a) FROM rows").fetchall())
    with sqlite3.connect(":memory:") as data:
        data.execute("CREATE TABLE rows (a REAL)")
    with tf.summary.create_file_writer(logdir="results/logs").as_default():
        tf.summary.scalar("rows", rows[0], step=0)
    print("events", len(os.listdir("results/logs")))
    net = model()
    net.fit(x, y, 20, verbose=0)
    tf.io.gfile.rmtree("results/gfile")  # which all ranks have made before they fit
    checkpoint = tf.train.Checkpoint(model=net)
    manager = tf.train.CheckpointManager(checkpoint, "results/states", max_to_keep=2)
    for _ in range(4):
        manager.save()
    checkpoint.restore(manager.latest_checkpoint).expect_partial()
    tf.saved_model.save(net, "results/exported")
    print("checkpoint", sorted(os.listdir("results/states")), net.predict(x, 20, verbose=0).sum())


class Annealed(keras.Model):
    """A step that reads what Python has, and draws by tf.random."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
        self.beta = 0.0

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y = data
        noise = tf.random.normal(tf.shape(x), stddev=0.1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x + noise) - y) ** 2)
            loss += self.beta * tf.add_n([tf.nn.l2_loss(v) for v in self.trainable_variables])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "noise": noise[0, 0]}


class Anneal(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.beta += 0.01


class ArrayLike:
    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


def python():
    """What Python code does once in each trace, or sees of a batch then, is as in one process."""
    for size in (23, 35):  # a shorter last batch, and none
        keras.utils.set_random_seed(1)
        net = Annealed()
        net.compile(keras.optimizers.SGD(0.05))
        fit = net.fit(x, y, size, 3, verbose=0, callbacks=[Anneal()])
        show(f"annealed {size}", net, {k: v[-1] for k, v in fit.history.items()})
    weight = tf.Variable(tf.random.normal([6, 3]))

    @tf.function
    def masked(x):
        mask = np.random.rand(6) < 0.5
        noise = tf.random.uniform([2]) + tf.random.truncated_normal([2])
        draws = tf.random.uniform([2], 0, 9, dtype=tf.int32)
        kept = tf.where(mask, x, 0.0) @ weight
        weight.assign_add(tf.reduce_mean(x) * 0.01 * tf.ones([6, 3]))
        return tf.reduce_mean(kept), noise, draws

    @tf.function
    def mean(x):
        """Of batches of one size only, and how many rows that is."""
        return tf.reduce_sum(x) / (x.shape[0] or 1) * (x.shape[0] == 35), x.shape[0]

    @tf.function(input_signature=[tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int32)])
    def policy(states, actions):
        return tf.reduce_sum(states @ weight, 1) + tf.cast(actions, tf.float32)

    @tf.function
    def apart(later, first, *, z, a):
        return tf.reduce_mean(later) + 2 * tf.reduce_mean(first) + 3 * tf.reduce_sum(a * z)

    for part in (x[:35], x[35:], x[:20]):
        for _ in range(2):
            print("masked", *(np.round(part, 4).tolist() for part in masked(part)))
            print("mean", *map(float, mean(part)))
        print("policy", float(tf.reduce_sum(policy(part.astype("float64"), np.arange(len(part))))))
        like = ArrayLike(part[:, 0])
        print("apart", float(apart(first=part, later=like, z=part[:, 1], a=part[:, 2])))
    print("drawn", np.random.rand())


if __name__ == "__main__":
    counts = []
    for name in sys.argv[1:]:
        (vars(auto_steps) | globals())[name]()
        counts.append([name, sum(seen)])
        seen.clear()
    with open("rows", "w") as file:
        json.dump(counts, file)
