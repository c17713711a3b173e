"""Pairs of features that have once failed together, or written a wrong file."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import model_ranks
from tests.harness import training
from tests.parallel.features.test_feature_pairs import assert_equal_on_all_ranks, by_rank, rows_of

RANK, SIZE = hvd.rank(), hvd.size()
BROADCAST = hvd.callbacks.BroadcastGlobalVariablesCallback


# Options of older Keras.


def test_accumulation_where_keras_has_no_multi_optimizer(monkeypatch) -> None:
    monkeypatch.delattr(keras.optimizers, "MultiOptimizer", raising=False)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    assert optimizer.gradient_accumulation_steps == 2


# Loss scaling that compile adds, and state in shares.


def half_precision_model():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return training.dense_model()
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_model_with_loss_scaling_by_compile_and_shares_is_saved_whole(directory) -> None:
    def trained(shard_state):
        model = half_precision_model()
        training.set_weights(model, seed=3)
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(hvd.DistributedOptimizer(optimizer, shard_state=shard_state), "mse")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        training.fit(model)
        return model

    sharded, plain = trained(True), trained(False)
    hvd.save_model(sharded, directory / "model.keras")
    hvd.barrier()
    loaded = keras.models.load_model(directory / "model.keras")
    plain.save(directory / "plain.keras")
    plain = keras.models.load_model(directory / "plain.keras")
    training.assert_same(loaded.optimizer.variables, plain.optimizer.variables)
    again = hvd.load_model(directory / "model.keras", shard_state=True)
    assert len(again.optimizer.variables) == len(plain.optimizer.variables)


# Copies of callbacks, and process sets.


def test_a_copied_callback_has_the_same_process_set(directory) -> None:
    every = copy.deepcopy([BROADCAST(0), hvd.callbacks.Checkpoint(directory)])
    model = training.compiled()
    x, y = training.data(model, 1)
    model.fit(x, y, verbose=0, callbacks=every)
    some = hvd.add_process_set([0])
    assert copy.deepcopy(some) is some
    assert copy.copy(hvd.global_process_set) is hvd.global_process_set


# A MultiOptimizer whose parts are distributed.


@pytest.mark.parametrize("chosen_by", ["map", "function", "half precision"])
def test_a_multi_optimizer_of_distributed_optimizers(chosen_by, directory) -> None:
    parts = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2)]
    if chosen_by != "function":
        from keras.src.optimizers.multi_optimizer import OptimizerMap

        chosen = OptimizerMap(parts[0], {"dense.*/bias": parts[1]})
    else:

        def chosen(variable):
            return parts["bias" in variable.path]

    several = keras.optimizers.MultiOptimizer(chosen)
    if chosen_by == "map":
        with pytest.raises(ValueError, match="distributed already"):
            hvd.DistributedOptimizer(several)
    if chosen_by == "function":
        twice, inner = training.dense_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        outer = keras.optimizers.MultiOptimizer(lambda variable: inner)
        twice.compile(hvd.DistributedOptimizer(outer), "mse")
        with pytest.raises(ValueError, match="within another distributed one"):
            twice.fit(*training.mine(twice), verbose=0)
    model = half_precision_model() if "half" in chosen_by else training.dense_model()
    model.compile(several, "mse")
    assert model_ranks.process_set_of(model) is hvd.global_process_set
    logger = keras.callbacks.CSVLogger(directory / f"{RANK}.csv")
    x, y = training.data(model, 1)
    y *= RANK + 1
    if "half" in chosen_by and RANK:
        y[:2] = np.inf  # one rank overflows, and all skip the step
    model.fit(x, y, verbose=0, callbacks=[BROADCAST(0), logger])
    assert_equal_on_all_ranks(model.get_weights())
    assert [path.name for path in directory.glob("*.csv")] == ["0.csv"]


# Methods of tapes, and layers of some ranks.


def test_a_tape_refuses_jacobians_and_can_be_copied() -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as plain:
        y = x * x * (1.0 + RANK)
    tape = copy.copy(hvd.DistributedGradientTape(plain))
    np.testing.assert_allclose(tape.gradient(y, x), [1.0 + SIZE, 2.0 + 2.0 * SIZE])
    for name in ("jacobian", "batch_jacobian"):
        with pytest.raises(NotImplementedError, match=r"over all ranks.*hvd.allreduce"):
            getattr(tape, name)


def test_synchronized_batch_normalization_of_one_rank() -> None:
    some = hvd.add_process_set([1])
    if RANK == 1:
        layer = hvd.SyncBatchNormalization(process_set=some, momentum=0.0)
        layer(np.array([[1.0], [3.0]], "float32"), training=True)
        np.testing.assert_allclose(layer.moving_mean, [2.0])


# Batch normalisation that is frozen after compile.


def test_statistics_of_a_layer_frozen_after_compile_are_averaged() -> None:
    layer = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = rows_of(RANK)
    for trainable in (True, False):
        layer.trainable = trainable
        model.fit(x + RANK, y, batch_size=4, verbose=0, callbacks=[BROADCAST(0)])
        assert_equal_on_all_ranks(model.get_weights())


def test_statistics_of_a_frozen_layer_keep_every_bit() -> None:
    layer = keras.layers.BatchNormalization(trainable=False)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    before = np.random.default_rng(1).normal(size=3).astype("float32")
    layer.moving_mean.assign(before)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(*rows_of(RANK), verbose=0, callbacks=[BROADCAST(0)])
    assert (np.asarray(layer.moving_mean) == before).all()


# Loss scaling.


class Counting(keras.callbacks.Callback):
    """Counts the requests of a step."""

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self.before = requests()

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.count = requests() - self.before


def requests() -> int:
    return sum(kind["requests"] for kind in hvd.stats()["collectives"].values())


def test_loss_scaling_adds_no_request_and_no_rank_updates_after_an_overflow() -> None:
    x, y = training.mine(training.dense_model())
    counts = []
    for scaled in (False, True):
        model = training.dense_model()
        training.set_weights(model, seed=3)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        model.compile(optimizer, "mse", auto_scale_loss=False)
        counting = Counting()
        training.fit(model, counting, data=(x, y))
        counts.append(counting.count)
    assert counts[0] == counts[1] > 0
    before = model.get_weights()
    bad = y * np.inf if RANK == SIZE - 1 else y
    training.fit(model, data=(x, bad), broadcast=False)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert by_rank([optimizer.dynamic_scale]).ravel() == pytest.approx([8.0 / 2**6] * SIZE)


# Callbacks of which one alone names the ranks.


def test_a_callback_without_a_set_follows_the_one_that_names_it(directory) -> None:
    class Taped(training.OwnStep):
        def tape(self, tape):
            return hvd.DistributedGradientTape(tape, process_set=some)

    some = hvd.add_process_set([1])
    if RANK == 1:
        model = Taped([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        checkpoint = hvd.callbacks.Checkpoint(directory, process_set=some)
        averages = hvd.callbacks.MetricAverageCallback()
        model.fit(*rows_of(RANK), verbose=0, callbacks=[checkpoint, averages])
        assert averages.process_set.ranks == [1]
