"""Embeddings whose rows the optimizer updates one by one: the step reads only what it looks up."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
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


class Looks(keras.layers.Layer):
    """Looks up each row once, however many examples use it."""

    def __init__(self, kind: str, rows: int) -> None:
        super().__init__()
        self.kind, self.rows = kind, rows

    def build(self, shape) -> None:
        self.table = self.add_weight(shape=(self.rows, 2), name="table")
        if self.kind == "positions of build":  # too many for a constant of the graph
            self.ids = keras.ops.arange(self.rows)
        if self.kind == "positions in a weight":
            self.ids = self.add_weight(
                shape=(self.rows,),
                dtype="int32",
                initializer=lambda shape, dtype: keras.ops.arange(shape[0], dtype=dtype),
                trainable=False,
            )

    def call(self, x):
        if self.kind.startswith("positions"):
            rows = keras.ops.take(self.table, keras.ops.cast(self.ids, "int64"), axis=0)
            return keras.ops.cast(x[:, :1], "float32") * keras.ops.sum(rows**2, axis=0)
        if self.kind == "unique":
            ids, places = tf.unique(tf.reshape(x, [-1]))
            rows = tf.gather(tf.gather(self.table, ids), places)
            return tf.reduce_sum(tf.reshape(rows, [-1, x.shape[1], 2]), 1)
        sparse = tf.sparse.from_dense(x + 1)
        sparse = sparse.with_values(sparse.values - 1)
        found = tf.nn.embedding_lookup_sparse
        if self.kind == "bag that is safe":
            return tf.nn.safe_embedding_lookup_sparse(self.table.value, sparse)
        return found(self.table.value, sparse, None, combiner="sqrtn")


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
@pytest.mark.parametrize(
    "kind", ["positions of build", "positions in a weight", "unique", "bag", "bag that is safe"]
)
def test_rows_that_a_batch_has_once_are_updated_once(kind: str, optimizer: str) -> None:
    """Such optimizers square what one process has as the sum of all rows."""
    rows = 200 if kind.startswith("positions") else 9
    ids = np.random.default_rng(3).integers(0, 9, (8 * SIZE, 4))  # ranks have ids in common
    data = ids, ids.sum(1, keepdims=True) / 9

    def fitted(shared: bool) -> list[np.ndarray]:
        net = keras.Sequential([keras.Input((4,), dtype="int32"), Looks(kind, rows)])
        net.set_weights([np.ones_like(w) if w.dtype == "float32" else w for w in net.get_weights()])
        made = getattr(optimizers, optimizer)(0.1)
        net.compile(hvd.DistributedOptimizer(made) if shared else made, "mse", jit_compile=False)
        if shared:
            net.fit(hvd.data.shard(data, batch_size=4, shuffle=False), epochs=2, verbose=0)
        else:
            with hvd.local_fit():
                net.fit(*data, batch_size=4 * SIZE, shuffle=False, epochs=2, verbose=0)
        return net.get_weights()

    for one, other in zip(fitted(True), fitted(False), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["captured", "in a variable", "all at once"])
def test_rows_of_data_from_outside_of_the_step_stay_separate(kind: str) -> None:
    """Ids that a batch has once, but that other ranks have, too: one process squares each row."""
    every = np.stack([np.random.default_rng(5 + r).permutation(6)[:4] for r in range(2 * SIZE)])

    def trained(shared: bool) -> np.ndarray:
        table = tf.Variable(np.ones((6, 2), "float32"))
        rows = every.reshape(2, SIZE, 4)[:, RANK] if shared else every.reshape(2, 4 * SIZE)
        data = tf.Variable(rows) if kind == "in a variable" else tf.constant(rows)
        at = tf.Variable(0)
        made = optimizers.Adagrad(0.1)
        made = hvd.DistributedOptimizer(made) if shared else made
        made.build([table])

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                ids = data[0] if kind == "all at once" else data[at]
                found = tf.gather(table, ids) * tf.cast(ids[:, None] + 1, tf.float32)
                loss = tf.reduce_mean(found**2)
            made.apply(tape.gradient(loss, [table]), [table])
            at.assign(1 - at)

        for _ in range(4):
            step()
        return table.numpy()

    with hvd.local_fit():
        alone = trained(False)
    np.testing.assert_allclose(trained(True), alone, rtol=1e-5)
