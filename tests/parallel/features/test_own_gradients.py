"""Steps of one's own that change gradients, or skip updates, before an optimizer averages them."""

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import ops
from hvd_keras.training import row_trials
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
ROWS, STEPS = 4, 4


def accumulated(step, gradients):
    for total, gradient in zip(step.totals, gradients, strict=True):
        total.assign_add(gradient)
    means = [tf.convert_to_tensor(total) / 2 for total in step.totals]
    for total in step.totals:
        total.assign(tf.zeros_like(total))
    return means


def normalized_in_a_function(step, gradients):
    @tf.function
    def normalized(gradients):
        return [g / tf.norm(g) for g in gradients]

    return normalized(gradients)


class Step(training.OwnStep):
    def loss_of(self, x, y):
        return tf.reduce_mean(tf.square(self(x, training=True) - y))


def fit(step: type[Step], x: np.ndarray | None = None, **options) -> keras.Model:
    model = step([keras.Input((6,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    weights = model.trainable_variables
    model.totals = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in weights]
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), **options)
    if x is None:
        x = np.random.default_rng(RANK).normal(size=(ROWS * STEPS, 6)).astype("float32")
    y = 3 * x.sum(axis=1, keepdims=True)
    training.fit(model, data=(x, y))
    return model


RIGHT = {
    "halved": lambda _, of: [tf.cast(tf.cast(g, tf.float64) * 0.5, tf.float32) for g in of],
    "decayed": lambda step, of: [
        g + 0.01 * w for g, w in zip(of, step.trainable_variables, strict=True)
    ],
    "rescaled": lambda step, of: [
        g * (1.0 + tf.cast(step.optimizer.iterations % 2, "float32")) for g in of
    ],
    "centred": lambda _, of: [g - tf.reduce_mean(g, axis=0, keepdims=True) for g in of],
    "accumulated": accumulated,
    "over all norms": lambda _, of: [g / hvd.allreduce(tf.linalg.global_norm(of)) for g in of],
}
WRONG = {
    "clipped": lambda _, of: tf.clip_by_global_norm(of, 1.0)[0],
    "clipped by value": lambda _, of: [tf.clip_by_value(g, -0.1, 0.1) for g in of],
    "without NaNs": lambda _, of: [tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)) for g in of],
    "normalized in a function": normalized_in_a_function,
    "with noise": lambda _, of: [g + tf.random.normal(g.shape) for g in of],
}


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("change", "eager"),
    [
        *((change, False) for change in [*RIGHT, *WRONG]),
        *((change, True) for change in ("halved", "rescaled", "accumulated", "clipped")),
    ],
)
def test_changed_gradients_are_told(change: str, eager: bool, warned) -> None:
    fit(type("Own", (Step,), {"change": (RIGHT | WRONG)[change]}), run_eagerly=eager)
    told = [text for text in warned if "gradients are changed before" in text]
    assert bool(told) == (change in WRONG and RANK == 0), told
    where = training.__file__ if eager else __file__  # the step, or the op within it
    assert all(f"{where}:" in text for text in told), told


def test_what_is_watched_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(tf.clip_by_value)) is tf.clip_by_value


@pytest.mark.parametrize("eager", [False, True])
def test_gradients_of_all_ranks_may_be_changed(eager: bool, warned) -> None:
    own = {"change": WRONG["clipped"], "tape": staticmethod(hvd.DistributedGradientTape)}
    fit(type("Own", (Step,), own), run_eagerly=eager)
    assert not any("gradients are changed" in text for text in warned), warned


class Sharpness(Step):
    """Takes the gradient where a first one leads (SAM, Foret et al. 2021)."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        moves = [g / 8 for g in self.tape(tape).gradient(loss, weights)]
        before = [tf.identity(w) for w in weights]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, weights)
        for weight, value in zip(weights, before, strict=True):
            weight.assign(value)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


@pytest.mark.cases(2)
@pytest.mark.parametrize("tape", [lambda tape: tape, hvd.DistributedGradientTape])
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"steps_per_execution": 2}])
def test_weights_moved_by_own_gradients_are_told(tape, options, warned) -> None:
    fit(type("Own", (Sharpness,), {"tape": staticmethod(tape)}), **options)
    fit(Step, **options)  # the second of two steps in one graph finds what the first has assigned
    told = [text for text in warned if "weights are moved by gradients of one rank" in text]
    is_own = tape is not hvd.DistributedGradientTape
    assert bool(told) == (is_own and RANK == 0), told
    assert all(f"{__file__}:" in text for text in told), told


class Skipping(Step):
    """Skips steps whose loss is not finite."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)

        def update():
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return tf.constant(0)

        tf.cond(tf.math.is_finite(loss), update, lambda: tf.constant(0))
        return {"loss": loss}


class Loop:
    """A loop of its own that trains one weight; ``apply`` gets gradients."""

    def __init__(self) -> None:
        self.weight = tf.Variable(tf.ones([6]))
        rows = np.random.default_rng(RANK).normal(size=(ROWS, 6))
        self.rows = tf.constant(rows, tf.float32)
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        self.optimizer.build([self.weight])

    def loss(self, rows):
        return tf.reduce_mean(tf.square(rows * self.weight - 3.0))

    def gradient(self, rows, scale=1.0):
        with tf.GradientTape() as tape:
            loss = self.loss(rows) * scale
        return tape.gradient(loss, self.weight)

    def of_ids(self, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(self.weight, ids))
        return tf.convert_to_tensor(tape.gradient(loss, self.weight))  # which was sparse

    def added(self, rows):
        total = tf.zeros([6])
        for row in tf.range(ROWS):
            total += self.gradient(rows[row : row + 1])
        return total

    def added_later(self, rows):
        """What a pass of the loop clips, the next one adds."""
        total = last = tf.zeros([6])
        for row in tf.range(ROWS):
            total += last
            last = clip(self.gradient(rows[row : row + 1]))
        return total

    def exchanged(self, rows):
        with tf.GradientTape() as tape:
            loss = self.loss(rows)
        return hvd.DistributedGradientTape(tape).gradient(loss, [self.weight])[0]

    def apply(self, gradient):
        self.optimizer.apply([gradient], [self.weight])


def in_function(of, *args):
    return tf.function(of)(*args)


def clip(gradient):
    return tf.clip_by_norm(t=gradient, clip_norm=0.1)


def scaled_by(scales, run):
    def loop(own):
        for scale in scales:
            run(lambda s: own.apply(own.gradient(own.rows, s) / s), scale)

    return loop


LOOPS_RIGHT = {
    "added in a loop": lambda own: in_function(lambda: own.apply(own.added(own.rows))),
    "added in a list": lambda own: in_function(
        lambda: own.apply(
            tf.reduce_mean(tf.map_fn(lambda row: own.gradient(row[tf.newaxis]), own.rows), 0)
        )
    ),
    "made dense": lambda own: in_function(
        lambda ids: own.apply(own.of_ids(ids)), tf.constant([RANK, 4, 4])
    ),
    "exchanged before": lambda own: in_function(
        lambda gradient: own.apply(clip(gradient)), in_function(own.exchanged, own.rows)
    ),
    "each row clipped": lambda own: in_function(
        lambda rows: own.apply(tf.reduce_mean(tf.clip_by_value(rows * own.weight, 0.0, 1.0), 0)),
        own.rows,
    ),
    "the same case": lambda own: in_function(
        lambda: own.apply(
            tf.switch_case(
                tf.cast(own.weight[0], tf.int32),
                [lambda: tf.zeros([6]), lambda: own.gradient(own.rows)],
            )
        )
    ),
    "a scale that changes": scaled_by((8.0, 8.0, 4.0), lambda step, scale: step(scale)),
    "a scale that is given": scaled_by(tf.constant([8.0]), in_function),
    "the same branch": lambda own: in_function(
        lambda: own.apply(
            tf.cond(own.weight[0] > 0, lambda: own.gradient(own.rows), lambda: tf.zeros([6]))
        )
    ),
}
LOOPS_WRONG = {
    "of a function, clipped": lambda own: own.apply(clip(in_function(own.gradient, own.rows))),
    "of two functions": lambda own: in_function(
        lambda gradient: own.apply(clip(gradient)), in_function(own.gradient, own.rows)
    ),
    "of no tape": lambda own: in_function(
        lambda: own.apply(clip(*tf.gradients(own.loss(own.rows), [own.weight])))
    ),
    "added in a loop, clipped": lambda own: in_function(
        lambda: own.apply(clip(own.added(own.rows)))
    ),
    "added in the next pass, clipped": lambda own: in_function(
        lambda: own.apply(own.added_later(own.rows))
    ),
    "scaled by counts of its ids": lambda own: in_function(
        lambda ids: own.apply(
            own.gradient(own.rows) * tf.math.unsorted_segment_sum(tf.ones([3]), ids, 6)
        ),
        tf.constant([RANK, 4, 4]),
    ),
    "a branch by rows": lambda own: in_function(
        lambda rows: own.apply(
            tf.cond(rows[0, 0] > 0, lambda: own.gradient(rows), lambda: tf.zeros([6]))
        ),
        own.rows,
    ),
}


@pytest.mark.parametrize("name", [*LOOPS_RIGHT, *LOOPS_WRONG])
def test_gradients_that_a_loop_changes_are_told(name: str, warned, monkeypatch) -> None:
    monkeypatch.setattr(ops, "has_reduced", lambda: False)  # other tests have
    (LOOPS_RIGHT | LOOPS_WRONG)[name](Loop())
    told = [text for text in warned if "gradients are changed before" in text]
    assert bool(told) == (name in LOOPS_WRONG and RANK == 0), warned
    assert all(f"{__file__}:" in text for text in told), told


OPTIONS = [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}]


@pytest.mark.cases(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_that_skip_different_steps_get_an_error(options) -> None:
    x = np.ones((ROWS * STEPS, 6), "float32")
    x[ROWS * (1 + RANK % 2), 0] = np.nan
    kind = ValueError if "run_eagerly" in options else tf.errors.FailedPreconditionError
    with pytest.raises(kind, match="the ranks skip different steps"):
        fit(Skipping, x, **options)


@pytest.mark.cases(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_may_skip_the_same_step(options) -> None:
    x = np.random.default_rng(RANK).normal(size=(ROWS * STEPS, 6)).astype("float32")
    x[ROWS, 0] = np.nan
    model = fit(Skipping, x, **options)
    assert int(model.optimizer.iterations) == STEPS - 1
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_batch_after_a_fit_of_several_steps_at_once_skips_nothing() -> None:
    """It has the size of those of fit on rank 0, where Keras takes the step of fit again."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer, "mse", steps_per_execution=2)
    x = np.random.default_rng(RANK).normal(size=(12, 2)).astype("float32")
    rows = x, x, np.ones(12, "float32")
    data = tf.data.Dataset.from_tensor_slices(rows).batch(4 - RANK, drop_remainder=True).take(2)
    model.fit(data, verbose=0)
    for _ in range(2):
        model.train_on_batch(*(part[:4] for part in rows))
    assert int(optimizer.iterations) == 2
    assert len(set(hvd.allgather_object(model.get_weights()[0].tobytes()))) == 1


def of_four_rows(y_true, y_pred):
    return tf.reduce_mean(tf.square(tf.ensure_shape(y_true, (ROWS, 1)) - y_pred))


def test_a_loss_that_cannot_be_tried_is_told(warned) -> None:
    for loss in ("mse", of_four_rows):
        fit(keras.Sequential, loss=loss)
        about = [text for text in warned if "cannot be tried" in text]
        assert len(about) == (loss == of_four_rows), warned


class Rooted(keras.losses.Loss):
    """A loss that a script changes."""

    is_rooted = False

    def call(self, y_true, y_pred):
        mean = tf.reduce_mean(tf.square(y_true - y_pred))
        return tf.sqrt(mean) if self.is_rooted else mean


def test_what_is_known_of_a_loss_is_not_kept_when_it_changes() -> None:
    loss, y = Rooted(), tf.zeros((ROWS, 1))
    assert row_trials.kind_of(loss, y, y) == "mean"
    loss.is_rooted = True
    assert row_trials.kind_of(loss, y, y) == "whole"


class Clips(training.OwnStep):
    """Clips what its tape gives, whether or not that is distributed."""

    op = None  # of its tape, if that is distributed

    def loss_of(self, x, y):
        return tf.reduce_mean(tf.square(self(x) - y)) / (SIZE if self.op is hvd.Sum else 1)

    def tape(self, tape):
        return tape if self.op is None else hvd.DistributedGradientTape(tape, op=self.op)

    def change(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.5)[0]


@pytest.mark.cases(3)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"shard_state": True}])
def test_gradients_of_a_tape_are_not_exchanged_again(options, eager: bool) -> None:
    """Adam squares the rows of a sparse gradient, so twice the rows with half the values differ."""
    random = np.random.default_rng(3)
    ids, y = random.integers(0, 6, (SIZE * ROWS * STEPS, 3)), random.normal(size=(SIZE * 16, 1))

    def trained(is_alone: bool) -> list[np.ndarray]:
        layers = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = Clips([keras.Input((3,), dtype="int32"), *layers])
        model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
        optimizer = keras.optimizers.Adam(0.05)
        if not is_alone:
            model.op = options.get("op", hvd.Average)
            optimizer = hvd.DistributedOptimizer(optimizer, **options)
        model.compile(optimizer, run_eagerly=eager)
        part = slice(None) if is_alone else slice(RANK, None, SIZE)
        size = SIZE * ROWS if is_alone else ROWS
        model.fit(ids[part], y[part], batch_size=size, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    together = trained(False)
    with hvd.local_fit():
        alone = trained(True)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_beside_those_of_a_distributed_tape_are_exchanged(compiled: bool) -> None:
    weight = tf.Variable(tf.zeros([2]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(weight * x)
        (known,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        (own,) = tape.gradient(loss, [weight])
        if RANK == 0:  # the script's code may differ by rank
            own = tf.identity(own)
        optimizer.apply([0.5 * own + 0.0 * tf.norm(known)], [weight])

    (tf.function(step) if compiled else step)(tf.fill([2], 1.0 + RANK))
    np.testing.assert_allclose(weight, -0.5 * np.full(2, np.mean(range(1, SIZE + 1))))


def test_a_rank_alone_may_copy_what_a_distributed_tape_returns() -> None:
    weight = tf.Variable(tf.zeros([2]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * (1.0 + RANK))
    (known,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
    optimizer.apply([tf.identity(known) if RANK == 0 else known], [weight])
    np.testing.assert_allclose(weight, -np.full(2, np.mean(range(1, SIZE + 1))))


class OfRows(keras.Sequential):
    """Gives a tape the loss of each row, or of a model's input; the gradient is that of the sum."""

    of = "rows"  # or those of compile, or means of columns

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as of_input:
                of_input.watch(x)
                y_pred = self(x)
            slope = of_input.gradient(y_pred, x)  # a vector, but of no variable
            rows = (y - y_pred)[:, 0] ** 2
            if self.of == "compile":
                rows = self.compute_loss(x, y, y_pred)
            loss = rows + tf.reduce_sum(slope**2, 1)
            if self.of == "columns":
                loss = tf.reduce_mean((x - y_pred) ** 2, 0)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": tf.reduce_mean(loss)}


@pytest.mark.parametrize("of", ["rows", "compile", "columns"])
def test_a_gradient_of_a_vector_is_told(of: str, warned) -> None:
    net = OfRows([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones")])
    net.of = of
    loss = keras.losses.MeanSquaredError(reduction="none")
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss)
    x = np.random.default_rng(RANK).normal(size=(8, 6)).astype("float32")
    net.fit(x, x[:, :1], verbose=0)
    told = [text for text in warned if "a tape gets a loss for each row" in text]
    assert len(told) == (of == "rows"), warned
