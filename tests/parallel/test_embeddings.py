"""N ranks with parts of tables train like one process with plain Keras's whole tables."""

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(2, 3)
ROWS, COLUMNS, BATCH, STEPS = 23, 5, 4, 3
once = pytest.mark.skipif(SIZE > 2, reason="shows no more on more ranks")
layers = keras.layers


def model_of(table: Any) -> keras.Model:
    """Two features share a table."""
    one, two = keras.Input((3,), dtype="int32"), keras.Input((2,), dtype="int32")
    both = layers.Concatenate(axis=1)([table(one), table(two)])
    hidden = layers.Dense(4, activation="tanh")(layers.Flatten()(both))
    return keras.Model([one, two], layers.Dense(1, dtype="float32")(hidden))


def rows() -> list[np.ndarray]:
    """Ids, many of them several times in a batch, the first of each feature not 0; labels."""
    random = np.random.default_rng(3)
    count = SIZE * BATCH * STEPS
    ids = random.integers(0, ROWS, (count, 5)) * random.integers(0, 2, (count, 5))
    ids[:, [0, 3]] = np.maximum(ids[:, [0, 3]], 1)
    return [ids[:, :3], ids[:, 3:], random.normal(size=(count, 1)).astype("float32")]


def share(array: np.ndarray) -> np.ndarray:
    """This rank's rows of each step."""
    return array.reshape(STEPS, SIZE, BATCH, -1)[:, RANK].reshape(STEPS * BATCH, -1)


def tables_of(model: keras.Model) -> list[Any]:
    kinds = (layers.Embedding, hvd.layers.Embedding)
    found = [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]
    return sorted(found, key=lambda layer: layer.name)


def others_of(model: keras.Model) -> list[Any]:
    mine = {id(table.embeddings) for table in tables_of(model)}
    return [weight for weight in model.weights if id(weight) not in mine]


def set_weights(model: keras.Model) -> None:
    random = np.random.default_rng(1)
    for table in tables_of(model):
        values = random.normal(size=(table.input_dim, table.output_dim), scale=0.5)
        if isinstance(table, hvd.layers.Embedding):
            table.set_table(values.astype("float32"))
        else:
            table.embeddings.assign(values)
    for weight in others_of(model):
        weight.assign(random.normal(size=weight.shape, scale=0.5))


def values_of(model: keras.Model) -> list[np.ndarray]:
    wholes = [
        t.get_table() if isinstance(t, hvd.layers.Embedding) else t.embeddings.numpy()
        for t in tables_of(model)
    ]
    return [*wholes, *(weight.numpy() for weight in others_of(model))]


def assert_like_one_process(
    together: keras.Model, alone: Callable[[], keras.Model], rtol: float, atol: float
) -> None:
    """Checks the weights; ``alone`` makes and trains the model of the one process."""
    mine = values_of(together)
    for weight in others_of(together):
        everyone = hvd.allgather(weight.numpy()[np.newaxis]).numpy()
        np.testing.assert_array_equal(everyone, np.broadcast_to(everyone[0], everyone.shape))
    if RANK > 0:
        return
    with hvd.local_fit():
        other = alone()
    for one, two in zip(mine, values_of(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=rtol, atol=atol)
    start = keras.models.clone_model(other)
    set_weights(start)
    for before, after in zip(values_of(start), values_of(other), strict=True):
        assert np.abs(before - after).max() > 10 * atol, "training did nothing"


def several_tables(divided: bool) -> keras.Model:
    """Tables of all layouts: small ones have no options here, so each has its own."""
    one, two = keras.Input((3,), dtype="int32"), keras.Input((2,), dtype="int32")
    names = ("first", "second", "third")
    if not divided:
        tables = [layers.Embedding(ROWS, COLUMNS, name=name) for name in names]
        found = [tables[0](one), tables[0](two), tables[1](one), tables[2](two)]
    else:
        pairs = zip(names, ("rows", "columns", None), strict=True)
        lookup = hvd.layers.Embeddings(
            {n: hvd.layers.Embedding(ROWS, COLUMNS, shard=shard, name=n) for n, shard in pairs},
            features={"a": "first", "b": "first", "c": "second", "d": "third"},
        )
        of = lookup({"a": one, "b": two, "c": one, "d": two})
        found = [of[feature] for feature in "abcd"]
    hidden = layers.Dense(4, activation="tanh")(layers.Flatten()(layers.Concatenate(axis=1)(found)))
    return keras.Model([one, two], layers.Dense(1)(hidden))


@pytest.mark.ranks(2, 3, 4)
def test_many_tables_with_one_exchange() -> None:
    before, data = counts(), rows()

    def trained(divided: bool, parts: list[Any]) -> keras.Model:
        model, adam = several_tables(divided), keras.optimizers.Adam(0.05)
        set_weights(model)
        # A few steps take less time than tracing.
        model.compile(hvd.DistributedOptimizer(adam) if divided else adam, "mse", run_eagerly=True)
        how = {"batch_size": BATCH if divided else SIZE * BATCH, "broadcast": divided}
        training.fit(model, data=(parts[:-1], parts[-1]), **how)
        return model

    together = trained(True, [share(part) for part in data])
    assert_like_one_process(together, lambda: trained(False, data), rtol=1e-4, atol=1e-5)
    assert counts() - before == 3 * STEPS, "ids, rows and gradients, once in each step"


def test_tables_that_have_their_values_keep_them() -> None:
    """Together they would be divided otherwise than each alone."""
    values = [np.arange(rows * 32.0).reshape(-1, 32) for rows in (80_000, 10_000)]
    tables = {str(len(v)): hvd.layers.Embedding(len(v), 32, weights=[v]) for v in values}
    found = hvd.layers.Embeddings(tables)({name: tf.constant([1 + RANK]) for name in tables})
    for rows, whole in zip(found.values(), values, strict=True):
        np.testing.assert_array_equal(rows, whole[[1 + RANK]])


def counts() -> int:
    return hvd.stats()["collectives"].get("alltoall", {"requests": 0})["requests"]


def test_uneven_batches_in_a_custom_loop() -> None:
    """With hvd.Sum and a loss over the number of all rows, ranks may have different batches."""
    data = rows()
    count = len(data[0])
    cuts = [count * r * (r + 1) // (SIZE * (SIZE + 1)) for r in range(SIZE + 1)]
    optimizer = keras.optimizers.Adagrad(0.1)
    model = model_of(hvd.layers.Embedding(ROWS, COLUMNS, shard="rows"))
    set_weights(model)

    def train(
        model: keras.Model, optimizer: Any, parts: list[np.ndarray], together: bool
    ) -> keras.Model:
        for _ in range(4):
            with tf.GradientTape() as tape:
                predicted = model(parts[:-1], training=True)
                loss = tf.reduce_sum(tf.square(predicted - parts[-1])) / count
            wrapped = hvd.DistributedGradientTape(tape, op=hvd.Sum) if together else tape
            gradients = wrapped.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return model

    train(model, optimizer, [part[cuts[RANK] : cuts[RANK + 1]] for part in data], True)

    def alone() -> keras.Model:
        other = model_of(layers.Embedding(ROWS, COLUMNS))
        set_weights(other)
        return train(other, keras.optimizers.Adagrad(0.1), data, False)

    # The optimizer has slots of parts, which a broadcast must leave alone.
    before = model.get_weights(), [v.numpy() for v in optimizer.variables]
    hvd.broadcast_variables([*model.variables, *optimizer.variables], 0)
    training.assert_same([*before[0], *before[1]], [*model.weights, *optimizer.variables])
    assert_like_one_process(model, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shard", ["rows", "columns", None])
def test_ids_of_all_kinds(shard) -> None:
    table = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype("float32")
    layer = hvd.layers.Embedding(ROWS, COLUMNS, shard=shard, weights=table)
    np.testing.assert_array_equal(layer.get_table(), table)
    ids = np.random.default_rng(RANK).integers(0, ROWS, (3 + RANK, 2))
    np.testing.assert_array_equal(layer(ids), table[ids])
    np.testing.assert_array_equal(layer(ids.astype("float32")), table[ids])
    np.testing.assert_array_equal(layer(ids[: RANK % 2]), table[ids[: RANK % 2]])  # none on rank 0
    ragged = tf.ragged.constant([[1, 2, 2], [], [RANK]], dtype=tf.int32)
    np.testing.assert_array_equal(layer(ragged).flat_values, table[[1, 2, 2, RANK]])
    for combiner, expected in (
        ("sum", table[[1, 2, 2]].sum(axis=0)),
        ("mean", table[[1, 2, 2]].mean(axis=0)),
        ("sqrtn", table[[1, 2, 2]].sum(axis=0) / np.sqrt(3)),
    ):
        options = {"shard": shard, "combiner": combiner, "weights": table}
        combined = hvd.layers.Embedding(ROWS, COLUMNS, **options)(ragged).numpy()
        np.testing.assert_allclose(combined, [expected, 0 * expected, table[RANK]], rtol=1e-5)
    options = {"shard": shard, "combiner": "mean", "dtype": "mixed_bfloat16"}
    coarse = hvd.layers.Embedding(ROWS, COLUMNS, weights=table, **options)
    for many in tf.fill([2, 1000], 3), tf.RaggedTensor.from_row_lengths(tf.fill([900], 3), [900]):
        np.testing.assert_allclose(coarse(many)[0], table[3], rtol=0.01)
    with pytest.raises(TypeError, match=r"sparse tensor, expected a dense or ragged tensor"):
        layer.call(tf.sparse.from_dense(ids))


@once
@pytest.mark.parametrize("initializer", ["uniform", "random_normal", "he_normal"])
def test_initial_values_are_those_of_one_process(initializer: str) -> None:
    def made(cls: Any, **more: Any) -> Any:
        keras.utils.set_random_seed(3)
        layer = cls(5000, 6, embeddings_initializer=keras.initializers.get(initializer), **more)
        layer.build()
        return layer

    expected = made(layers.Embedding).embeddings.numpy()
    for shard in ("rows", "columns"):
        table = made(hvd.layers.Embedding, shard=shard).get_table()
        np.testing.assert_array_equal(table, expected)


def test_ids_out_of_range_of_a_divided_table_are_an_error_on_all_ranks() -> None:
    layer = hvd.layers.Embedding(ROWS, COLUMNS, shard="rows", name="items")
    last = SIZE - 1
    for call in (layer, tf.function(lambda ids: layer(ids))):
        for wrong in (ROWS, -1):
            ids = tf.constant([1, wrong if last == RANK else 2])
            text = f"rank {last} looked up id {wrong} in embedding items, which has ids from 0 to"
            with pytest.raises(tf.errors.InvalidArgumentError, match=text):
                call(ids)
        assert call(tf.constant([1, 2])).shape == (2, COLUMNS), "works afterwards"
    whole = hvd.layers.Embedding(ROWS, COLUMNS, shard=None)  # each rank has its own errors
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {RANK} looked up id {ROWS}"):
        whole(tf.constant([ROWS]))


def test_vocabularies_that_differ_are_found() -> None:
    layer = hvd.layers.Embedding(ROWS + RANK, COLUMNS, shard="rows", name="items")
    with pytest.raises(ValueError, match=f"items: the ranks' tables differ: rank 0: {ROWS} x"):
        layer(tf.constant([1]))


@once
def test_what_is_not_possible_is_refused() -> None:
    make = hvd.layers.Embedding
    with pytest.raises(ValueError, match=r"shard is 'row', expected 'auto', 'rows', 'columns' or"):
        make(ROWS, COLUMNS, shard="row")
    with pytest.raises(ValueError, match="combiner is 'max', expected None, 'sum'"):
        make(ROWS, COLUMNS, combiner="max")
    with pytest.raises(ValueError, match="input_dim is 0, expected a positive integer"):
        make(0, COLUMNS)
    with pytest.raises(ValueError, match=r"output_dim 1 cannot be divided .* Use shard='rows'"):
        make(ROWS, 1, shard="columns")
    with pytest.raises(ValueError, match=r"constraint is .* Use shard=None"):
        make(ROWS, COLUMNS, shard="rows", embeddings_constraint=keras.constraints.MaxNorm(1))
    regularizer = keras.regularizers.OrthogonalRegularizer()
    with pytest.raises(ValueError, match=r"regularizer is .* Use shard=None"):
        make(ROWS, COLUMNS, shard="rows", embeddings_regularizer=regularizer)
    with pytest.raises(ValueError, match="lora_rank is not supported"):
        make(ROWS, COLUMNS, lora_rank=2)
    with pytest.raises(ValueError, match=r"got a table of shape \[2, 2\], expected \[23, 5\]"):
        make(ROWS, COLUMNS, weights=np.zeros((2, 2)))
    layer = make(ROWS, COLUMNS, shard="rows")
    layer.build()
    with pytest.raises(ValueError, match=r"Own computes with whole variables.*shard=None"):
        type("Own", (keras.optimizers.Lamb,), {})().build(layer.trainable_variables)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"op=hvd.Adasum is not possible"):
        optimizer.apply([tf.zeros(layer.embeddings.shape)], layer.trainable_variables)
    with pytest.raises(NotImplementedError, match=r"XLA cannot compile the lookup.*jit_compile"):
        tf.function(lambda ids: layer(ids), jit_compile=True)(tf.constant([1]))
    with pytest.raises(ValueError, match=r"clipnorm.*hvd.DistributedOptimizer"):
        keras.optimizers.SGD(0.1, clipnorm=1.0).apply(
            [tf.zeros(layer.embeddings.shape)], layer.trainable_variables
        )
    with pytest.raises(ValueError, match=r"features .*x.* name tables that do not exist"):
        hvd.layers.Embeddings({"a": layer}, {"x": "b"})


@once
@pytest.mark.parametrize("compiled", [lambda step: step, tf.function])
def test_gradients_of_a_part_alone(compiled: Any, warned: list[str]) -> None:
    """No rank knows the norm of a table's gradient, and what reads its part is no loss of it."""
    layer = hvd.layers.Embedding(ROWS, COLUMNS, shard="rows")
    bias, ids = keras.Variable([1.0]), tf.constant([1, 2 + RANK])
    layer.build()
    weights = [layer.embeddings, bias]

    def looked_up() -> Any:
        return tf.reduce_sum(layer(ids)) * tf.reduce_sum(bias)

    def gradients(loss: Any = None, together: bool = True) -> Any:
        with tf.GradientTape() as tape:
            value = (loss or looked_up)()
        tape = hvd.DistributedGradientTape(tape) if together else tape
        return tape.gradient(value, weights)

    for clip in (
        lambda: tf.clip_by_global_norm(gradients(), 1.0),
        lambda: tf.clip_by_norm(gradients()[0], 1.0),
        lambda: tf.clip_by_norm(t=gradients()[0].values, clip_norm=1.0),
    ):
        with pytest.raises(ValueError, match=r"clip_by_.*norm clips by norms, but .*/embeddings"):
            compiled(clip)()
    values, _ = compiled(lambda: [tf.clip_by_value(one, -0.1, 0.1) for one in gradients()])()
    np.testing.assert_array_equal(values.values, np.full(values.values.shape, np.float32(0.1)))

    compiled(lambda: tf.clip_by_global_norm(gradients(), 1.0, use_norm=tf.ones([])))()

    def with_a_penalty() -> Any:
        return looked_up() + tf.nn.l2_loss(layer.embeddings)

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(weights)
    assert not warned
    if compiled is tf.function:  # eager code cannot tell a penalty from what is recomputed
        compiled(lambda: optimizer.apply(gradients(with_a_penalty, False)))()
        compiled(lambda: optimizer.apply(tf.clip_by_global_norm(gradients(None, False), 1.0)[0]))()
        told = hvd.broadcast_object(warned, 0)
        assert re.search("reads .*/embeddings otherwise than by its layer.*shard=None", told[0])
        assert re.search(
            "train as one process. If they are clipped, let the optimizer clip", told[1]
        )
        assert len(told) == 2
        warned.clear()
    compiled(lambda: gradients(tf.recompute_grad(looked_up)))()
    layer = hvd.layers.Embedding(ROWS, COLUMNS, embeddings_regularizer="l2", shard="rows")
    layer.build()
    weights = [layer.embeddings.value, bias]
    compiled(lambda: gradients(lambda: looked_up() + tf.add_n(layer.losses)))()
    assert not warned
