"""Weights that part after the first broadcast, and rows that all ranks have, are errors."""

import os
import re
import time
import tracemalloc

import keras
import numpy as np
import pandas
import pytest
import scipy.sparse
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import values
from hvd_keras.runtime import log, settings
from tests.harness import training
from tests.harness.shards import Batches
from tests.harness.training import compiled, fit

RANK, SIZE = hvd.rank(), hvd.size()
SGD = keras.optimizers.SGD
# The same lines tell it in both ways, as test_a_rate_from_the_ranks_own_logs shows.
WAYS = [False, pytest.param(True, marks=pytest.mark.slow)]


@pytest.fixture(params=WAYS, ids=["warning", "error"])
def told(request, monkeypatch):
    """Calls a function, and returns what hvd_keras tells of it on rank 0."""
    if request.param:
        monkeypatch.setattr(settings, "read", lambda read=settings.read: by_default(read()))

    def call(function, kind=ValueError) -> str:
        warnings: list[str] = []
        monkeypatch.setattr(log, "warn_once", warnings.append)
        if request.param:
            try:
                function()
            except kind as error:
                return str(error).removeprefix("hvd_keras: ")
            return ""
        function()
        assert not warnings or RANK == 0
        assert len(warnings) <= 1, warnings
        return hvd.broadcast_object("".join(warnings), 0)

    return call


def by_default(values):
    return type(values)(**{**vars(values), "strict": None})


def mine():
    return training.mine(training.dense_model())


def test_weights_set_on_one_rank_between_two_fits(told) -> None:
    model = compiled()
    assert told(lambda: fit(model)) == ""
    if RANK == 0:
        training.set_weights(model, seed=1)
    text = told(lambda: fit(model, broadcast=False))
    assert "began to train with different weights" in text
    assert "kernel" in text
    assert "BroadcastGlobalVariablesCallback(0)" in text


class Shrink(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None) -> None:
        self.model.set_weights([0.9 * weight for weight in self.model.get_weights()])


SCHEDULE = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))


@pytest.mark.parametrize(
    ("callback", "place"), [(SCHEDULE, "before the first step"), (Shrink(), "after ")]
)
def test_callbacks_of_one_rank_are_named_if_values_differ(told, callback, place) -> None:
    """And none is advised that is there."""
    text = told(lambda: fit(compiled(), *[callback] * (RANK == 0), epochs=2))
    assert f"differ {place}" in text
    name = type(callback).__name__
    assert f"Not all ranks have the same callbacks (rank 0: {name}), or a callback" in text
    assert "Add hvd.callbacks.BroadcastGlobalVariablesCallback" not in text


def test_fit_ends_together_after_a_warning_about_a_difference(warned, directory) -> None:
    class Write(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            if RANK == 0:
                time.sleep(1)
                (directory / "written").touch()

    model = compiled()
    training.set_weights(model, seed=RANK)
    fit(model, Write(), broadcast=False)
    assert len(warned) == (RANK == 0)
    assert (directory / "written").exists()


@pytest.mark.parametrize("told", [False, True], ids=["warning", "error"], indirect=True)
def test_a_rate_from_the_ranks_own_logs(told) -> None:
    class Plateau(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.01 * float(logs["loss"])

    text = told(lambda: fit(compiled(), Plateau(), epochs=3))
    assert "learning_rate" in text
    assert "differ after" in text


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("parts", ["never", "by its rate", "after join"])
def test_weights_that_part_in_a_custom_loop(is_graph, parts, told) -> None:
    model, optimizer = training.dense_model(), SGD(0.01)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(step) if is_graph else step
    x, y = mine()

    def loop() -> None:
        # After join, ranks go on at different steps; and rank 0 makes none in an epoch.
        for epoch, steps in enumerate((60 + RANK, 2 * RANK, 60 + RANK)):
            for i in range(steps):
                if (parts, RANK, epoch, i) == ("by its rate", SIZE - 1, 2, 20):
                    optimizer.learning_rate = 0.02
                step(x, y)
            last = int(hvd.join())
            if parts != "after join":
                hvd.broadcast_variables(model.variables, root_rank=last)

    kind = tf.errors.InvalidArgumentError if is_graph else ValueError
    text = told(loop, kind)
    late, joined = r"differ after 51 steps of loop \d+ of tape", "differ after hvd.join: .* last"
    found = [bool(re.search(one, text)) for one in (late, joined)]
    assert found == [parts == "by its rate", parts == "after join"]


def test_two_models_of_one_function_that_is_saved(directory, told, monkeypatch) -> None:
    """Their comparisons take turns, and do not keep the module from being saved."""
    monkeypatch.setattr(values, "_SHARE", 1e9)  # as often as may be

    class Trainer(tf.Module):
        def __init__(self) -> None:
            self.models = [training.dense_model(), training.dense_model()]
            self.optimizers = [SGD(0.01), SGD(0.01 * (1 + RANK))]
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                optimizer.build(model.trainable_variables)
                hvd.broadcast_variables([*model.variables, *optimizer.variables], 0)

        @tf.function
        def step(self, x, y):
            for i, model in enumerate(self.models):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(y - model(x)))
                options = {} if i == 0 else {"compression": hvd.Compression.fp16}
                tape = hvd.DistributedGradientTape(tape, **options)
                gradients = tape.gradient(loss, model.trainable_variables)
                pairs = zip(gradients, model.trainable_variables, strict=True)
                self.optimizers[i].apply_gradients(pairs)

    trainer = Trainer()
    x, y = mine()
    assert told(lambda: [trainer.step(x, y) for _ in range(60)]) == ""
    tf.saved_model.save(trainer, str(directory / f"{RANK}"))
    if RANK:
        trainer.optimizers[1].learning_rate = 0.5
    text = told(lambda: [trainer.step(x, y) for _ in range(120)], tf.errors.InvalidArgumentError)
    assert "although they were equal after" in text


class Codebook(keras.layers.Layer):
    def build(self, shape) -> None:
        self.codes = self.add_weight(shape=(shape[-1],), trainable=False, name="codes")

    def call(self, x, training=False):
        if training:
            self.codes.assign(0.9 * self.codes + 0.1 * keras.ops.mean(x, axis=0))
        return x + keras.ops.stop_gradient(self.codes)


class RawCodebook(Codebook):
    def build(self, shape) -> None:
        self.codes = tf.Variable(tf.zeros([shape[-1]]), trainable=False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Codebook, ["codes", "differ after"]),
        (RawCodebook, ["codes, a tf.Variable, differs by rank"]),
    ],
)
def test_a_codebook_that_each_rank_has(kind, words, told) -> None:
    text = told(
        lambda: fit(compiled(keras.Sequential([keras.Input((5,)), kind(), keras.layers.Dense(1)])))
    )
    assert all(word in text for word in words)


def test_weights_that_part_within_a_long_epoch(told) -> None:
    class Once(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == 0 and batch == 3:
                self.model.layers[0].bias.assign_add([1.0] * 7)
            self.last = batch

    once = Once()
    x, y = (np.tile(part, (40, 1)) for part in mine())
    text = told(lambda: fit(compiled(), once, data=(x, y)))
    assert "differ after 50 steps" in text
    assert once.last in (49, 239)  # an error ends it after the first check


class Round(keras.callbacks.Callback):
    """Before the first comparison, and after it."""

    by = 2e-6

    def on_train_batch_end(self, batch, logs=None):
        if batch in (3, 53):
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * (1 + self.by * RANK))
        if batch == 51:
            training.assert_bit_identical_on_all_ranks(self.model)


def test_what_a_gpu_rounds_is_put_together(monkeypatch) -> None:
    """As if rank 1 had a GPU: there kernels that round differently are part of TensorFlow."""
    monkeypatch.setattr(values, "has_gpu", lambda: RANK == 1)
    model = compiled()
    x, y = (np.tile(part, (20, 1)) for part in mine())
    fit(model, Round(), data=(x, y))
    training.assert_bit_identical_on_all_ranks(model)
    with pytest.raises(RuntimeError, match=r"after batch 4 of epoch 1 the values of .*kernel diff"):
        fit(compiled(), Round(), hvd.callbacks.VerifyWeights(4), data=(x, y))


def test_what_is_more_than_a_gpu_rounds(monkeypatch, told) -> None:
    monkeypatch.setattr(values, "has_gpu", lambda: True)
    monkeypatch.setattr(Round, "by", 1e-4)
    assert "differ after" in told(lambda: fit(compiled(), Round()))


@pytest.mark.ranks(3)
def test_a_flipped_bit_is_named_with_its_rank_and_host(told, monkeypatch) -> None:
    monkeypatch.setattr(values, "_SHARE", 1e9)  # compare after each 50 steps

    class Faulty(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == 1 and batch == 60:
                training.flip(self.model.layers[0].kernel, 30)

    x, y = (np.tile(part, (20, 1)) for part in mine())
    text = told(lambda: fit(compiled(), Faulty(), data=(x, y)))
    assert "kernel differ after" in text
    assert "although they were equal after 50:" in text
    assert f"but not rank 1 on {os.uname().nodename}:" in text


@pytest.mark.ranks(3)
def test_each_flipped_bit_is_found(monkeypatch) -> None:
    """In variables of several dtypes, and in a large one."""
    monkeypatch.setattr(values, "_STEPS", 1)
    monkeypatch.setattr(values, "_SHARE", 1e9)  # compare after each step
    dtypes = ("float32", "float16", "bfloat16", "float64", "int64", "uint8")
    variables = [tf.Variable(tf.ones(7, dtype), name=dtype) for dtype in dtypes]
    variables += [tf.Variable(1.0, name="scalar"), tf.Variable(tf.ones((3000, 100)), name="large")]
    seen = values.Values(variables, hvd.global_process_set)

    def found() -> tuple[str, str] | None:
        """What the next comparisons find."""
        return next(filter(None, (seen.different_after_step() for _ in range(2))), None)

    random = np.random.default_rng(0)  # the same on all ranks
    for variable in variables:
        size = np.asarray(variable).nbytes * 8
        for bit in range(size) if size == 32 else random.choice(size, 4, replace=False):
            culprit = int(random.integers(SIZE))
            for expected in ((variable.name, f"rank {culprit} on {os.uname().nodename}"), None):
                if culprit == RANK:
                    training.flip(variable, int(bit))
                assert found() == expected


def test_two_ranks_do_not_know_whose_values_are_wrong() -> None:
    variable = tf.Variable(tf.ones(3), name="weights")
    if RANK == 0:
        training.flip(variable, 5)
    seen = values.Values([variable], hvd.global_process_set)
    assert seen.different("begin") == ("weights:0", "")


@pytest.mark.cases(1)
def test_no_warning_about_legitimate_differences(told) -> None:
    """Dropout's seeds, moving statistics, a recurrent layer's state, local layers, accumulators."""
    words = keras.Input((4, 5), batch_size=4)
    hidden = keras.layers.GRU(3, stateful=True)(words)
    hidden = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(hidden))
    local = keras.layers.Dense(2)
    model = keras.Model(words, keras.layers.Dense(1)(local(hidden)))
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(hvd.PartialDistributedOptimizer(optimizer, local_layers=local), loss="mse")
    random = np.random.default_rng(RANK)
    x, y = random.normal(size=(240, 4, 5)), random.normal(size=(240, 1))
    assert told(lambda: fit(model, data=(x, y), epochs=2)) == ""
    statistics = model.layers[2].moving_mean.numpy()
    assert statistics.any()


def datasets(x, y):
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    ragged = tf.data.Dataset.from_tensor_slices((tf.RaggedTensor.from_tensor(x), y))
    yield x, {"y": y, "batch_size": 4}
    yield rows.map(lambda x, y: (x, y + tf.constant([0.0]))).shuffle(64).batch(4), {}
    yield rows.batch(4), {}
    yield ragged.map(lambda x, y: (tf.ensure_shape(x, [5]), y)).batch(4), {}
    yield Batches(x, y), {}
    yield Batches(x, y), {"shuffle": True}
    yield pandas.DataFrame(x), {"y": pandas.DataFrame(y), "batch_size": 4, "shuffle": True}
    yield scipy.sparse.csr_matrix(x), {"y": y, "batch_size": 4}
    yield tf.sparse.from_dense(x), {"y": y, "batch_size": 4}


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "kind",
    range(9),
    ids=[
        *("arrays", "shuffled", "dataset", "ragged dataset", "PyDataset", "PyDataset, shuffled"),
        *("pandas", "SciPy", "sparse"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2])
def test_all_ranks_train_on_the_same_rows(kind: int, at_once: int, told) -> None:
    tf.random.set_seed(1 if at_once == 1 else None)  # of a shuffle without one of its own
    whole = training.data(training.dense_model(), SIZE)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for data, differ in ((whole, False), (mine(), True)):
        x, arguments = list(datasets(*data))[kind]
        model = training.dense_model()
        training.compiled(model, SGD(0.01), steps_per_execution=at_once)
        text = told(
            lambda model=model, x=x, arguments=arguments: model.fit(
                x, **{"shuffle": False, **arguments}, callbacks=[broadcast], verbose=0
            )
        )
        assert ("train on the same rows" in text) != differ
        assert ("hvd.data.shard" in text) != differ


def test_the_first_rows_of_sparse_and_ragged_tensors_are_compared() -> None:
    equal = np.full((70, 5), [0, RANK + 1, 2, 3, 4])
    last, later = np.array(equal), np.array(equal)
    last[63, 4] = later[63, 4] = later[64, 4] = 9
    kinds = [np.asarray, scipy.sparse.csr_matrix, tf.sparse.from_dense, tf.RaggedTensor.from_tensor]
    for kind in kinds:
        hashes = [values.row_hashes(kind(x)) for x in (equal * 0, equal, last, later)]
        assert hashes[:2] == [None, None]
        assert hashes[2]
        assert hashes[2] == hashes[3]
    wide = scipy.sparse.eye_array(64, 2**20, format="csr")
    tracemalloc.start()
    assert values.row_hashes(wide) is not None
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_first_batch_that_was_looked_at_is_trained_on() -> None:
    """Each batch is read once, and the step gets all of them in their order."""
    read: list[int] = []

    def batches():
        for i in range(5):
            read.append(i)
            yield np.full((2, 5), 10.0 * i + RANK, "float32"), np.zeros((2, 1), "float32")

    class Rows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(self.model.seen.numpy()))

    class Seeing(keras.Sequential):
        def train_step(self, data):
            self.seen.assign(data[0][0, 0])
            return super().train_step(data)

    seen: list[float] = []
    model = Seeing([keras.Input((5,)), keras.layers.Dense(1)])
    model.seen = tf.Variable(-1.0)
    compiled(model)
    model.fit(batches(), callbacks=[Rows()], verbose=0, steps_per_epoch=5)
    assert seen == [10.0 * i + RANK for i in range(5)]
    assert read == list(range(5))


def test_equal_rows_say_nothing(told) -> None:
    """Such as the zeros of a script that makes its own batches."""
    x, y = np.zeros((16, 5)), np.zeros((16, 1))
    assert told(lambda: fit(compiled(), data=(x, y))) == ""
