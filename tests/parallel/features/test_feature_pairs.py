"""Pairs of features that have once changed each other's result."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import model_ranks
from hvd_keras.horovod import elastic
from hvd_keras.runtime import settings

RANK, SIZE = hvd.rank(), hvd.size()
BROADCAST = hvd.callbacks.BroadcastGlobalVariablesCallback


def by_rank(values):
    """Returns every rank's values, stacked; ``values`` is a list of arrays."""
    flat = np.concatenate([np.asarray(v, "float32").ravel() for v in values])
    return hvd.allgather(flat[np.newaxis]).numpy()


def assert_equal_on_all_ranks(values) -> None:
    everyone = by_rank(values)
    assert (everyone == everyone[0]).all()


def two_layers():
    """The first layer belongs to each rank alone, the second to all."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    random = np.random.default_rng(5)
    model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
    return model


def rows_of(rank):
    random = np.random.default_rng(20 + rank)
    x = random.normal(size=(8, 3)).astype("float32")
    return x, random.normal(size=(8, 1)).astype("float32") * (1 + 3 * rank)


# Local variables and clipping.


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adafactor, keras.optimizers.Lion])
def test_slots_belong_to_a_weight_whatever_their_names_and_shapes(optimizer) -> None:
    local = keras.Variable(np.ones((3, 2 + RANK)), name="kernel")
    common = keras.Variable(np.ones((3, 2)), name="kernel")
    distributed = hvd.DistributedOptimizer(optimizer(0.1, use_ema=True))
    distributed.register_local_var(local)
    distributed.build([local, common])
    distributed.apply([tf.ones(local.shape) * (1.0 + RANK), tf.ones(common.shape) * RANK])
    shared = model_ranks.without_local([local, common, *distributed.variables])
    # The count of updates, the rate, and half of the slots.
    slots = len(distributed.variables) - 2
    assert len(shared) == 1 + 2 + slots // 2
    before = [np.asarray(v) for v in distributed.variables]
    hvd.broadcast_variables(shared, 0)
    for value, variable in zip(before, distributed.variables, strict=True):
        if not any(variable is one for one in shared):
            np.testing.assert_array_equal(np.asarray(variable), value)


def test_variables_of_unknown_sizes() -> None:
    weight = tf.Variable(tf.ones([4]) * RANK, shape=tf.TensorShape([None]))
    hvd.broadcast_variables([weight], SIZE - 1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * RANK)
    gradient = hvd.DistributedGradientTape(tape).gradient(loss, weight)
    np.testing.assert_allclose(weight, np.full(4, SIZE - 1))
    np.testing.assert_allclose(gradient, np.full(4, np.mean(range(SIZE))))
    with pytest.raises(TypeError, match="dtype string"):
        hvd.broadcast_variables([tf.Variable(["text"])], 0)


def test_global_clipnorm_with_a_local_layer_on_one_rank_only() -> None:
    model = two_layers()
    layers = model.layers[:1] if RANK == 1 else []
    if RANK != 1:
        model.layers[0].trainable = False
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.05), local_layers=layers
    )
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(*rows_of(RANK), batch_size=8, epochs=3, verbose=0, shuffle=False)
    assert_equal_on_all_ranks(model.layers[1].get_weights())


# A tape, and an optimizer that gets gradients without variables.


def test_apply_of_gradients_alone_behind_a_tape(monkeypatch) -> None:
    strict = dataclasses.replace(settings.read(), strict=True)
    monkeypatch.setattr(settings, "read", lambda: strict)
    model = two_layers()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    x, y = rows_of(RANK)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply(gradients)
    assert_equal_on_all_ranks(model.get_weights())


def test_clipping_by_this_ranks_part_of_a_table_is_refused_without_variables() -> None:
    table = hvd.layers.Embedding(6, 2, shard="rows")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, clipnorm=0.1)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, 0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(np.array([[RANK, 2]])))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    with pytest.raises(ValueError, match="each rank has a part of"):
        optimizer.apply(gradients)


# Join and state in shares.


def test_join_with_state_in_shares_is_an_error() -> None:
    kernels = [tf.Variable(tf.fill([4, 4], float(i))) for i in range(2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)

    def step():
        optimizer.apply([tf.ones([4, 4])] * 2, kernels)

    step()
    before = [np.asarray(kernel) for kernel in kernels]
    if RANK == 0:
        hvd.join()
    else:
        with pytest.raises(tf.errors.OpError, match=r"a rank has joined.*same number of batches"):
            step()
        hvd.join()
    for old, kernel in zip(before, kernels, strict=True):
        assert np.abs(np.asarray(kernel) - old).max() < 0.02  # its own step, not another's values


@pytest.mark.parametrize("others", [0, 1])
def test_join_warns_about_accumulated_gradients_that_are_lost(others: int, warned) -> None:
    model = two_layers()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer = hvd.DistributedOptimizer(optimizer)
    x, y = rows_of(RANK)
    for _ in range(1 + (others if RANK == 0 else 0)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    hvd.join()
    told = [text for text in warned if "gradients of 1 of 2 steps" in text]
    assert len(told) == (RANK > 0 and others > 0)


# Random numbers.


def test_broadcast_variables_leaves_the_ranks_different_masks() -> None:
    dropout = keras.layers.Dropout(0.5, seed=-3)
    model = keras.Sequential([keras.Input((64,)), dropout])

    def masks():
        return by_rank([model(np.ones((1, 64), "float32"), training=True)])

    hvd.broadcast_variables(model.variables, root_rank=SIZE - 1)
    first = masks()
    assert not (first[0] == first[1]).all()
    dropout.seed_generator.state.assign([-3, 0])
    tf.function(lambda: hvd.broadcast_variables(model.variables, root_rank=SIZE - 1))()
    assert (masks() == first).all()  # the same in each run, also in a function


def test_elastic_state_refuses_parts_and_leaves_the_ranks_different_masks() -> None:
    table = hvd.layers.Embedding(6, 2, shard="rows")
    table.build()
    adam = hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True)
    adam.build([keras.Variable([0.0])])
    for variables in (table.variables, adam.variables, [v.value for v in adam.variables]):
        with pytest.raises(ValueError, match="commits have those of rank 0 alone"):
            elastic.TensorFlowState(variables)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=3)])
    elastic.TensorFlowState(model.variables).sync()
    masks = by_rank([model(np.ones((1, 64), "float32"), training=True)])
    assert not (masks[0] == masks[1]).all()


# A restart and values that Keras derives from variables.


def test_a_restart_derives_the_constants_of_normalization(directory) -> None:
    x = np.array([[90.0], [110.0], [100.0], [95.0]], "float32")

    def run(epochs, adapt):
        normalization = keras.layers.Normalization()
        if adapt:
            normalization.adapt(x)
        else:
            normalization.build((None, 1))
        model = keras.Sequential([keras.Input((1,)), normalization, keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        callbacks = [BROADCAST(0), hvd.callbacks.Checkpoint(directory)]
        model.fit(x, x / 100, epochs=epochs, batch_size=2, verbose=0, callbacks=callbacks)
        return normalization, model

    run(1, adapt=True)
    normalization, model = run(2, adapt=False)
    assert np.asarray(normalization.mean) == pytest.approx(98.75)
    assert np.abs(model.get_weights()[-2]).max() < 10


def test_a_restart_with_words_in_another_order_is_refused(directory) -> None:
    def run(epochs, words):
        lookup = keras.layers.StringLookup()
        if RANK == 0:
            lookup.set_vocabulary(words)
        hvd.broadcast_preprocessing(lookup)
        layers = [lookup, keras.layers.Embedding(3, 2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((), dtype="string"), *layers])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
        x, y = tf.constant(["a", "b"]), np.array([[RANK], [1.0]])
        callbacks = [BROADCAST(0), hvd.callbacks.Checkpoint(directory)]
        model.fit(x, y, epochs=epochs, verbose=0, callbacks=callbacks)

    run(1, ["a", "b"])
    run(2, ["a", "b"])
    with pytest.raises(ValueError, match=r"vocabulary of 'string_lookup.*in the model"):
        run(3, ["b", "a"])
