"""Losses that do not divide by a fixed number: N ranks train as one process does."""

import dataclasses
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.patches import divided_losses
from hvd_keras.training import row_trials
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
ROWS, STEPS, LENGTH = training.BATCH, training.STEPS, 6
losses = keras.losses
NONE = "sum_over_batch_size"


def rows(seed: int = 1):
    """Sequences of which those of different ranks have different lengths; weights, too."""
    random = np.random.default_rng(seed)
    count = SIZE * ROWS * STEPS
    x = random.integers(1, 20, (count, LENGTH))
    rank_of = np.arange(count) // ROWS % SIZE
    length = np.where(rank_of == 0, LENGTH, 1 + random.integers(0, 2, count))
    x[np.arange(LENGTH) >= length[:, None]] = 0  # padding
    y = random.normal(size=(count, LENGTH, 1)).astype("float32")
    weights = (random.uniform(0.5, 1.5, count) * (1 + 5 * rank_of)).astype("float32")
    return x.astype("int32"), y, weights[:, np.newaxis]


def mine(array: np.ndarray) -> np.ndarray:
    return training.shard(array, RANK, SIZE)


def masked(mask_zero: bool = True) -> keras.Model:
    words = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(20, 4, mask_zero=mask_zero)(words)
    output = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1), name="a")(hidden)
    return keras.Model(words, output)


class Divides(keras.Model):
    """Divides what a loss adds up, or each row's."""

    reduction, divides, axis = "sum", True, -1

    def one(self, data):
        x, y = data
        of = losses.MeanSquaredError(reduction=self.reduction)
        if self.axis == 0:  # which compares rows
            of = losses.CosineSimilarity(0, reduction=self.reduction)
        loss = tf.reduce_sum(of(y, self(x, training=True)))
        return loss / tf.cast(tf.size(y), loss.dtype) if self.divides else loss

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.one(data)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}

    def test_step(self, data):
        self._loss_tracker.update_state(self.one(data))
        return {"loss": self._loss_tracker.result()}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("reduction", "axis", "eager"),
    [
        *[("none", -1, True), ("sum", -1, True), ("sum", -1, False), ("none", -1, False)],
        *[("sum", 0, True), ("sum", 0, False)],
    ],
)
def test_a_step_of_its_own_that_divides_a_sum(reduction, axis, eager, warned) -> None:
    def make() -> keras.Model:
        model = without_mask()
        model = Divides(model.inputs, model.outputs[0])
        model.reduction, model.axis = reduction, axis
        return model

    check(make, eager=eager, validates=True)
    assert not any("as a sum" in text for text in warned)
    if axis == 0:  # that of all rows
        return
    model = make()
    model.divides = False
    model.compile(hvd.DistributedOptimizer(SGD(0.001)), run_eagerly=eager)
    x, y, _ = rows()
    training.fit(model, data=(mine(x), mine(y)))
    assert any("as a sum" in text for text in warned)


@pytest.mark.cases(3)
@pytest.mark.parametrize("by_loss", [True, False])
@pytest.mark.parametrize(
    ("divisor", "is_told"), [(ROWS, False), (SIZE * ROWS, True), (ROWS + 3, True)]
)
def test_a_sum_that_is_divided_by_a_constant(divisor, is_told, by_loss, warned) -> None:
    class Own(Divides):
        def one(self, data):
            x, y = data
            loss = losses.MeanSquaredError(reduction="sum") if by_loss else tf.nn.l2_loss
            return (loss(y, self(x)) if by_loss else loss(y - self(x))) / divisor

    model = without_mask()
    model = Own(model.inputs, model.outputs[0])
    model.compile(hvd.DistributedOptimizer(SGD(0.001)))
    x, y, _ = rows()
    training.fit(model, data=(mine(x), mine(y)))
    told = any("sum" in text for text in warned)
    assert told == (is_told and (by_loss or RANK == 0)), warned


SGD = keras.optimizers.SGD


def check(make, optimizer=SGD, weighted=False, targets=lambda y: y, jit=False, **options) -> None:
    """Compares one process, which has all rows, with all ranks: weights and logs."""
    alone, together = make(), make()
    for model in (alone, together):
        training.set_weights(model, seed=3)
    x, y, weights = rows()
    y, shown = targets(y), []
    average = hvd.callbacks.MetricAverageCallback()
    metrics = options.get("metrics")
    for model, part, batch, callbacks in (
        (together, mine, ROWS, [average]),
        (alone, lambda a: a, SIZE * ROWS, []),
    ):
        if model is alone and RANK > 0:
            continue
        own = optimizer(0.1)
        if model is together:
            own = hvd.DistributedOptimizer(own)
        how = {"jit_compile": jit, "run_eagerly": options.get("eager", False)}
        loss = options.get("loss", losses.MeanSquaredError)()
        model.compile(own, loss, metrics=metrics, **how)
        validation = (part(x), part(y)) if options.get("validates") else None
        history = model.fit(
            part(x),
            part(y),
            sample_weight=part(weights) if weighted else None,
            validation_data=validation,
            validation_batch_size=batch,
            batch_size=batch,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        shown.append(history.history)
    training.assert_bit_identical_on_all_ranks(together)
    if RANK == 0:
        training.assert_close(together, alone)
        for key, values in shown[1].items():
            np.testing.assert_allclose(shown[0][key], values, rtol=1e-4, err_msg=key)


def ratio(y_true, y_pred):
    valid = tf.cast(y_true > 0, tf.float32)
    return tf.reduce_sum((y_true - y_pred) ** 2 * valid) / tf.reduce_sum(valid)


def mean(y_true, y_pred):
    return tf.reduce_mean((y_true - y_pred) ** 2) / 2.0


def of_known(y_true, y_pred):
    """Rows of negative labels do not count."""
    valid = tf.cast(y_true >= 0, tf.float32)
    return tf.reduce_sum((y_true - y_pred) ** 2 * valid) / (tf.reduce_sum(valid) + 1e-6)


def rmse(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean((y_true - y_pred) ** 2))


def growing():
    """A loss that does not compare rows in its first step."""
    part = tf.Variable(0.0)

    def loss(y_true, y_pred):
        value = tf.reduce_mean((y_true - y_pred) ** 2) + part * tf.reduce_max(y_pred)
        part.assign_add(0.1)
        return value

    return loss


def gathering(y_true, y_pred):
    """A loss that gathers the rows of all ranks by itself."""
    error = hvd.allgather(tf.reduce_mean((y_true - y_pred) ** 2, axis=(1, 2)))
    return tf.math.reduce_logsumexp(error)


def known(y: np.ndarray) -> np.ndarray:
    rank_of = np.arange(len(y)) // ROWS % SIZE
    return np.where(y[:, 0] > 0.8 * rank_of[:, None] - 0.5, -1, 1).astype("float32")


def column() -> keras.Model:
    words = keras.Input((LENGTH,), dtype="int32")
    pooled = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(words))
    return keras.Model(words, keras.layers.Dense(1)(pooled))


without_mask = functools.partial(masked, mask_zero=False)

# Random programs (tests/programs) have others, test_every_class those of Keras.
OF_ALL_ROWS = {
    "axis 0, XLA": {"loss": lambda: losses.CosineSimilarity(axis=0), "jit": True},
    "growing": {"loss": growing},
    "mean with mask": {"loss": lambda: mean, "make": masked},
    "ratio with weights": {"loss": lambda: ratio, "weighted": True},
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", OF_ALL_ROWS)
def test_losses_of_all_rows(name: str) -> None:
    check(**{"make": without_mask, **OF_ALL_ROWS[name]})


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("mark", "jit"),
    [("negative", False), ("negative", True), ("nonzero", True), ("nonzero", False)],
)
def test_masks_of_one_column(mark: str, jit: bool) -> None:
    """In losses, and in functions that are metrics."""
    loss, targets = of_known, known
    if mark == "nonzero":
        loss, targets = ratio, lambda y: np.maximum(known(y), 0)
    small = lambda rate: SGD(rate / 10)  # noqa: E731
    options = {"targets": targets, "metrics": [loss, rmse], "validates": True, "optimizer": small}
    check(column, loss=lambda: loss, jit=jit, **options)


@pytest.mark.parametrize("eager", [False, True])
def test_batches_that_each_rank_pads_by_itself(eager: bool) -> None:
    x, _, _ = rows()
    y = (x % 3 + 1).astype("float32")[..., None] * (x > 0)[..., None]
    model = keras.Sequential(
        [keras.Input((None,), dtype="int32"), keras.layers.Embedding(20, 4), keras.layers.Dense(1)]
    )
    alone = keras.models.clone_model(model)
    for net in (alone, model):
        training.set_weights(net, seed=3)

    def batches(x, y, size):
        for begin in range(0, len(x), size):
            some = slice(begin, begin + size)
            longest = (x[some] > 0).sum(1).max()
            yield x[some, :longest], y[some, :longest]

    shapes = tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, None, 1), tf.float32)
    for net, part, size in ((model, mine, ROWS), (alone, np.asarray, SIZE * ROWS)):
        if net is model or RANK == 0:
            of = functools.partial(batches, part(x), part(y), size)
            data = tf.data.Dataset.from_generator(of, output_signature=shapes)
            own = SGD(0.1)
            own = hvd.DistributedOptimizer(own) if net is model else own
            net.compile(own, ratio, run_eagerly=eager)
            net.fit(data, verbose=0)
    training.assert_bit_identical_on_all_ranks(model)
    if RANK == 0:
        training.assert_close(model, alone)


def test_a_loss_that_gathers_rows_itself() -> None:
    shown = []

    def plain(y_true, y_pred):
        return tf.math.reduce_logsumexp(tf.reduce_mean((y_true - y_pred) ** 2, axis=(1, 2)))

    for loss in (gathering, plain):
        model = without_mask()
        model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
        model.compile(hvd.DistributedOptimizer(SGD(0.01)), loss)
        x, y, _ = rows()
        average = hvd.callbacks.MetricAverageCallback()
        logs = training.fit(model, average, data=(mine(x), mine(y)), broadcast=False)
        shown.append([logs["loss"], model.get_weights()])
    for one, other in zip(*shown, strict=True):
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), one, other)


def test_validation_in_an_unknown_number_of_steps_warns(warned) -> None:
    x, y, _ = rows()
    model = masked()
    model.compile(hvd.DistributedOptimizer(SGD(0.01)), loss="mse")
    more = [np.concatenate([mine(a), mine(a)[: RANK * ROWS]]) for a in (x, y)]
    data = tf.data.Dataset.from_tensor_slices(tuple(more)).batch(ROWS)
    unknown = {"validation_data": data.filter(lambda x, y: tf.size(x) > 0)}
    average = hvd.callbacks.MetricAverageCallback()
    training.fit(model, average, data=(mine(x), mine(y)), **unknown)
    assert sum("validate in different numbers" in text for text in warned) == (RANK == 0)


class Square(losses.Loss):
    def call(self, y_true, y_pred):
        return (y_true - y_pred) ** 2


LOOPS = [
    *("masked", "masked in a function", "summed", "summed by Keras's step"),
    *("without a mask", "of all rows"),
]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_custom_loop_with_a_masked_or_summed_loss_warns(kind: str, eager: bool, warned) -> None:
    x, y, _ = rows()
    model = masked(mask_zero=kind != "without a mask")
    loss_of = losses.MeanSquaredError(reduction="sum" if "summed" in kind else NONE)
    loss_of = losses.Dice() if kind == "of all rows" else loss_of
    optimizer = hvd.DistributedOptimizer(SGD(0.01))
    hvd.broadcast_variables(model.variables, 0)

    def total(x, y):
        return loss_of(y, model(x, training=True))

    total = tf.function(total) if kind == "masked in a function" else total

    def step(x, y):
        if kind == "without a mask":  # an adversarial example trains nothing
            with tf.GradientTape() as tape:
                change = tf.zeros_like(y)
                tape.watch(change)
                loss = losses.MeanSquaredError(reduction="sum")(y, y + change)
            tape.gradient(loss, change)
        with tf.GradientTape() as tape:
            loss = total(x, y)
            if kind == "without a mask":  # a critic of the mean
                critic = tf.reduce_mean(model(x, training=True))
                loss += Square(reduction="sum")(0.0, critic)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    if kind == "summed by Keras's step":
        model.compile(optimizer, loss_of, run_eagerly=eager)
        model.train_on_batch(mine(x)[:ROWS], mine(y)[:ROWS])
    else:
        (step if eager else tf.function(step))(mine(x)[:ROWS], mine(y)[:ROWS])
    told = [text for text in warned if "in a custom loop" in text or "used as a sum" in text]
    assert len(told) == (kind != "without a mask"), warned


TOKENS, MORE_ROWS = 3, 12


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("kind", "divisor", "is_told"),
    [
        *[("rows", SIZE * MORE_ROWS, True), ("rows", MORE_ROWS, False)],
        *[("tape", SIZE * MORE_ROWS, True), ("sum", SIZE * MORE_ROWS, True)],
        *[("tokens", TOKENS * MORE_ROWS, False), ("tokens", MORE_ROWS, False)],
        *[
            ("a token for each rank", SIZE * MORE_ROWS, False),
            ("part of a batch", MORE_ROWS, False),
        ],
        ("unknown", MORE_ROWS, False),
    ],
)
def test_a_custom_loop_that_divides_by_a_constant(
    kind, divisor, is_told, warned, monkeypatch
) -> None:
    """Of the global batch, as TensorFlow's recipe for its own strategies does."""
    monkeypatch.setattr(divided_losses, "_seen", set())
    by_tape = kind == "tape"
    reduction = "sum" if kind in ("sum", "a token for each rank") else "none"
    tokens = {"tokens": TOKENS, "a token for each rank": SIZE}.get(kind, 1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5 * tokens)])
    model.add(keras.layers.Reshape((tokens, 5) if tokens > 1 else (5,)))
    hvd.broadcast_variables(model.variables, 0)
    loss_of = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    optimizer = SGD(0.01) if by_tape else hvd.DistributedOptimizer(SGD(0.01))
    shape = [None if kind == "unknown" else MORE_ROWS, 4]
    signature = [tf.TensorSpec(shape, tf.float32)] if kind == "unknown" else None

    @functools.partial(tf.function, input_signature=signature)
    def step(x):
        tape = tf.GradientTape()
        with hvd.DistributedGradientTape(tape) if by_tape else tape as tape:
            x = x[: MORE_ROWS // SIZE] if kind == "part of a batch" else x
            logits = model(x, training=True)
            if kind == "tokens":
                logits = tf.reshape(logits, [-1, 5])
            each = loss_of(tf.zeros(tf.shape(logits)[:-1], tf.int32), logits)
            loss = tf.reduce_sum(each) / divisor
            if reduction == "none":
                loss = tf.nn.compute_average_loss(each, global_batch_size=divisor)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    random = np.random.default_rng(RANK)
    for count in (MORE_ROWS, MORE_ROWS, MORE_ROWS // SIZE):  # the last batch is smaller
        step(tf.constant(random.normal(size=(count, 4)), tf.float32))
    assert any("is divided by" in text for text in warned) == is_told, warned


def of_classes(y_true, y_pred):
    """The third of three classes counts five times."""
    of = tf.cast(y_true[:, 0], tf.int32)
    weights = tf.gather([1.0, 1.0, 5.0], of)
    error = losses.sparse_categorical_crossentropy(of, y_pred)
    return tf.reduce_sum(weights * error) / tf.reduce_sum(weights)


def of_columns(y_true, y_pred):
    """Columns beyond the eighth have gaps."""
    return tf.reduce_mean(y_pred) + masked_mean(y_true[:, 8:] > -9.0, y_pred[:, 8:])


def of_negatives(y_true, y_pred):
    return tf.reduce_mean((y_true - y_pred) ** 2) + masked_mean(y_pred < 0, y_pred)


def of_other_classes(y_true, y_pred):
    return masked_mean(tf.reduce_all(y_true[..., None] != [3.0, 5.0], -1), y_pred)


def masked_mean(mask, values):
    mask = tf.cast(mask, tf.float32)
    return tf.reduce_sum(mask * values**2) / (tf.reduce_sum(mask) + 1e-6)


@dataclasses.dataclass
class OfRowsAlone:
    """A loss without a hash."""

    factor: float = 1.0

    def __call__(self, y_true, y_pred):
        return self.factor * tf.reduce_mean((y_true - y_pred) ** 2, -1)


@pytest.mark.parametrize(
    ("loss", "columns", "kind"),
    [
        *[(of_classes, 3, "whole"), (of_columns, 12, "whole"), (of_negatives, 1, "whole")],
        *[(of_other_classes, 1, "whole"), (OfRowsAlone(), 3, "rows"), (losses.Dice(), 1, "whole")],
        *[(losses.KLDivergence(), 12, "rows"), (losses.CategoricalCrossentropy(), 12, "rows")],
    ],
)
def test_what_a_loss_makes_of_rows(loss, columns: int, kind: str) -> None:
    y = np.random.default_rng(RANK).uniform(size=(ROWS, columns)).astype("float32")
    tried = loss if hasattr(loss, "call") else types.SimpleNamespace(fn=loss, call=loss)
    assert row_trials.kind_of(tried, y, tf.constant(y)) == kind
