"""Embeddings whose rows the optimizer updates one by one: the step reads only what it looks up."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import training

RANK = hvd.rank()
optimizers = keras.optimizers
UPDATES_ROWS = {
    "SGD": lambda **options: optimizers.SGD(0.1, **options),
    "RMSprop": lambda **options: optimizers.RMSprop(0.01, **options),
    "Adagrad": lambda **options: optimizers.Adagrad(0.1, **options),
    "Adadelta": lambda **options: optimizers.Adadelta(1.0, **options),
    "Adafactor": lambda **options: optimizers.Adafactor(0.01, **options),
}


def reads_of_table(model: keras.Model) -> list[str]:
    """The types of the ops with which a lookup reads the table."""
    layer = model.layers[0]
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec([None, 3], tf.int32)).graph
    table = graph.captures[0][1]
    return [op.type for op in graph.get_operations() if any(i is table for i in op.inputs)]


# That results are those of one process, random programs (tests/programs) show.
def trained(optimizer) -> keras.Model:
    model = training.compiled(training.sparse_model(), optimizer)
    training.set_weights(model, seed=RANK)
    before = model.get_weights()[0]
    training.fit(model)
    training.assert_bit_identical_on_all_ranks(model)
    assert (model.get_weights()[0] != before).any()
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", UPDATES_ROWS)
def test_only_rows_are_read(optimizer: str) -> None:
    assert reads_of_table(trained(UPDATES_ROWS[optimizer]())) == ["ResourceGather"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: optimizers.SGD(0.1, momentum=0.9),
        lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
        lambda: optimizers.Adam(0.01),
    ],
)
def test_the_table_is_read_if_all_of_it_is_updated(make_optimizer) -> None:
    assert set(reads_of_table(trained(make_optimizer()))) == {"ReadVariableOp"}


def test_lookups_are_those_of_keras() -> None:
    def model(policy: str) -> keras.Model:
        net = keras.Sequential(
            [keras.layers.Embedding(training.WORDS, 4, mask_zero=True, dtype=policy)]
        )
        net.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1)), "mse")
        return net

    x = np.arange(6).reshape(2, 3) + RANK
    for policy in ("float32", "mixed_bfloat16"):
        net = model(policy)
        net.fit(x, np.zeros((2, 3, 4)), verbose=0)
        assert ("ResourceGather" in reads_of_table(net)) == (policy == "float32")
        layer, table = net.layers[0], tf.cast(net.get_weights()[0], net.layers[0].compute_dtype)
        for indices in ([[1, -1]], np.array([[2.0, 3.0]]), tf.constant([[-30, 29]], tf.int64)):
            rows = layer(tf.constant(indices))
            assert rows.dtype == table.dtype
            expected = tf.gather(table, np.asarray(indices, int) % training.WORDS)
            np.testing.assert_array_equal(tf.cast(rows, "float32"), tf.cast(expected, "float32"))
        ragged = layer(tf.ragged.constant([[1], [2, 3]], dtype=tf.int32))
        assert ragged.flat_values.shape == (3, 4)
        with tf.device("/cpu:0"), pytest.raises(tf.errors.InvalidArgumentError):
            layer(tf.constant([[training.WORDS]]))  # a GPU returns zeros
