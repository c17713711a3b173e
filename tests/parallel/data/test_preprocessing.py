"""Preprocessing layers that were adapted to data that differs by rank."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from hvd_keras.training import preprocessing
from tests.harness import shards, training

error_of = functools.partial(shards.error_of, about="preprocessing")

RANK, SIZE = hvd.rank(), hvd.size()
SAME = ["red", "green", "blue"]
# Equally many on all ranks, so that shapes agree; the second entry after [UNK] differs.
OTHER = ["red", f"color {RANK}", "blue"]


def share() -> np.ndarray:
    return np.random.default_rng(RANK).normal(RANK, 1 + RANK, (20, 5)).astype("float32")


def adapted(layer, data):
    layer.adapt(data)
    return layer


def on_all_ranks(value) -> list[bytes]:
    return agree.gather_bytes("value", np.ascontiguousarray(value).tobytes())


def test_normalization_computes_with_the_values_that_were_broadcast() -> None:
    norm = adapted(keras.layers.Normalization(), share())
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(1)])
    training.set_weights(model, seed=0)
    norm.adapt(share())
    x = np.ones((3, 5), "float32")
    roots = hvd.broadcast(model(x), 0)
    assert len(set(on_all_ranks(model(x)))) == SIZE
    hvd.broadcast_variables(model.variables, 0)
    assert len(set(on_all_ranks(model(x)))) == SIZE, "then there is nothing to refresh"
    preprocessing.refresh(model, hvd.global_process_set)
    np.testing.assert_array_equal(model(x), roots)
    np.testing.assert_array_equal(model.predict(x, verbose=0), roots)
    traced = model.predict_function
    preprocessing.refresh(model, hvd.global_process_set)
    assert model.predict_function is traced, "nothing has changed"


LAYERS = {
    "StringLookup": lambda words: keras.layers.StringLookup(vocabulary=words),
    "TextVectorization": lambda words: adapted(keras.layers.TextVectorization(), words),
    "IntegerLookup": lambda words: adapted(
        keras.layers.IntegerLookup(), np.array([len(word) for word in words])
    ),
    "Discretization": lambda words: adapted(
        keras.layers.Discretization(num_bins=3), np.arange(9.0) * hash_of(words[1])
    ),
    "Hashing": lambda words: keras.layers.Hashing(num_bins=9, salt=[1, hash_of(words[1])]),
    "CategoryEncoding": lambda words: keras.layers.CategoryEncoding(hash_of(words[1])),
    "Normalization": lambda words: keras.layers.Normalization(mean=hash_of(words[1]), variance=1),
    "Rescaling": lambda words: keras.layers.Rescaling(1 / hash_of(words[1])),
}


def hash_of(word: str) -> int:
    return sum(word.encode()) % 97 + 1


@pytest.mark.parametrize("kind", LAYERS)
def test_state_that_differs_is_named_on_all_ranks(kind: str) -> None:
    words = [*OTHER, *["long " * RANK] * (kind == "IntegerLookup")]
    layer = LAYERS[kind](words)
    text = error_of(preprocessing.check_equal_on_all_ranks, [keras.layers.Dense(1), layer])
    assert kind in text
    assert "rank 0:" in text
    assert f"rank {SIZE - 1}:" in text
    assert "hvd.broadcast_preprocessing(layers, 0)" in text
    assert len(text.splitlines()) == 3


def test_text_shows_sizes_and_the_first_token_that_differs() -> None:
    text = error_of(
        preprocessing.check_equal_on_all_ranks,
        [keras.layers.StringLookup(vocabulary=OTHER, name="colors")],
    )
    assert "StringLookup 'colors', vocabulary: " in text
    assert "rank 0: 4 entries, [2] is 'color 0'; rank 1: 4 entries, [2] is 'color 1'" in text
    shorter = keras.layers.StringLookup(vocabulary=SAME[: 3 if RANK == 0 else 2])
    text = error_of(preprocessing.check_equal_on_all_ranks, [shorter])
    assert "rank 0: 4 entries, [3] is 'blue'; rank 1: 3 entries, no more" in text
    scale = 2.0 if RANK == 0 else [1.0, 2.0]  # a number there, a list here
    text = error_of(preprocessing.check_equal_on_all_ranks, [keras.layers.Rescaling(scale)])
    assert "rank 0: 2.0; rank 1: 2 entries, [0] is 1.0" in text
    more = [LAYERS["StringLookup"](SAME)] * (RANK == 0)
    text = error_of(preprocessing.check_equal_on_all_ranks, more)
    assert "rank 1: none" in text


@pytest.mark.parametrize("kind", LAYERS)
def test_equal_state_costs_one_gather(kind: str, monkeypatch) -> None:
    layer = LAYERS[kind](SAME)
    calls = []
    gather = agree.gather_json
    monkeypatch.setattr(agree, "gather_json", lambda *a: calls.append(a) or gather(*a))
    preprocessing.check_equal_on_all_ranks([layer])
    assert len(calls) == 1
    assert all(len(str(call[1])) < 80 for call in calls)


def test_layers_inside_of_models_are_found() -> None:
    inner = keras.Sequential([keras.Input((1,), dtype="string"), LAYERS["StringLookup"](OTHER)])
    outer = keras.Sequential([keras.Input((1,), dtype="string"), inner])
    for layers in [outer], outer._flatten_layers():
        assert "StringLookup" in error_of(preprocessing.check_equal_on_all_ranks, layers)


def test_what_the_root_has_learnt_is_given_to_all() -> None:
    root = SIZE - 1
    lookup, ints = keras.layers.StringLookup(), keras.layers.IntegerLookup()
    longer = {"max_tokens": 6, "pad_to_max_tokens": True}
    vectorization = keras.layers.TextVectorization(output_mode="tf_idf", **longer)
    bins, norm = keras.layers.Discretization(num_bins=3), keras.layers.Normalization()
    if root == RANK:
        lookup.adapt(OTHER)
        ints.adapt(np.arange(RANK + 3))
        vectorization.adapt(["red", "red blue", "green"])
        bins.adapt(share())
        norm.adapt(share())
    layers = [lookup, ints, vectorization, bins, norm]
    hvd.broadcast_preprocessing(layers, root)
    preprocessing.check_equal_on_all_ranks(layers)
    assert f"color {root}" in lookup.get_vocabulary()
    assert int(lookup(tf.constant("blue"))) == lookup.get_vocabulary().index("blue")
    assert ints.vocabulary_size() == root + 4
    x = np.ones((2, 5), "float32") * np.arange(5)
    for value in bins(x), norm(x), vectorization(tf.constant(["red green"])):
        values = on_all_ranks(value)
        assert set(values) == {values[0]}
        assert np.any(np.asarray(value) != 0)


@pytest.mark.parametrize("kind", ["StringLookup", "Normalization", "Discretization"])
def test_a_root_that_has_learnt_nothing_is_refused(kind: str) -> None:
    layer = keras.layers.Discretization(num_bins=3) if kind == "Discretization" else None
    layer = layer or getattr(keras.layers, kind)()
    if RANK == SIZE - 1:
        layer.adapt(OTHER if kind == "StringLookup" else share())
    with pytest.raises(ValueError, match=r"is adapted here, but not on the root: adapt it there"):
        hvd.broadcast_preprocessing(layer)
    with pytest.raises(ValueError, match="got 'red', expected layers of Keras"):
        hvd.broadcast_preprocessing("red" if RANK == 0 else layer)


def test_feature_space_adapted_on_the_root_alone() -> None:
    space = keras.utils.FeatureSpace(
        features={
            "color": keras.utils.FeatureSpace.string_categorical(num_oov_indices=1),
            "size": keras.utils.FeatureSpace.float_normalized(),
        },
        output_mode="concat",
    )
    rows = {"color": tf.constant(SAME), "size": tf.constant([1.0, 2.0, 4.0])}
    if RANK == 0:
        space.adapt(tf.data.Dataset.from_tensor_slices(rows))
    hvd.broadcast_preprocessing(space)
    encoded = space(rows)
    assert encoded.shape == (3, 5)
    assert len(set(on_all_ranks(encoded))) == 1


def test_state_that_a_rank_cannot_take_is_an_error_on_all() -> None:
    lookup = keras.layers.StringLookup(output_mode="one_hot")
    lookup.adapt(SAME if RANK == 0 else SAME[:2])
    lookup(tf.constant(["red"]))
    lookup.max_tokens = 4 if RANK == 0 else 3  # a vocabulary of the root's size does not fit
    assert "processing: rank 1: " in error_of(hvd.broadcast_preprocessing, lookup)
    layer = keras.layers.StringLookup() if RANK == 0 else keras.layers.Normalization()
    text = error_of(hvd.broadcast_preprocessing, layer)
    assert "got layers ['Normalization'], the root has ['StringLookup']" in text


def test_one_rank_alone_does_nothing() -> None:
    alone = hvd.ProcessSet([RANK])
    layer = LAYERS["StringLookup"](OTHER)
    preprocessing.check_equal_on_all_ranks([layer], alone)
    hvd.broadcast_preprocessing(layer, RANK, alone)
    assert layer.get_vocabulary() == ["[UNK]", *OTHER]


def test_fit_with_layers_adapted_to_each_ranks_share(warned) -> None:
    """Checks that the root's values are used from the first step on, and that this is told."""
    mine = np.random.default_rng(RANK).normal(3.0 + RANK, 2.0 + RANK, (16, 3)).astype("float32")
    normalization = keras.layers.Normalization()
    normalization.adapt(mine)
    model = keras.Sequential([keras.Input((3,)), normalization, keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    model.evaluate(mine, mine[:, :1], verbose=0)  # its function holds this rank's values
    training.fit(model, data=(mine, mine[:, :1]))
    same = np.ones((4, 3), "float32")
    everyone = hvd.allgather(model.predict(same, verbose=0)[np.newaxis]).numpy()
    assert (everyone == everyone[0]).all()
    everyone = hvd.allgather(np.array([model.evaluate(same, same[:, :1], verbose=0)])).numpy()
    assert (everyone == everyone[0]).all()
    assert any("adapted to other rows on each rank" in text for text in warned) == (RANK == 0)
    normalization.adapt(mine)
    hvd.broadcast_variables(model.variables, 0)
    assert any("computes with numbers from before" in text for text in warned) == (RANK > 0)


def test_fit_refuses_vocabularies_that_differ() -> None:
    lookup = keras.layers.StringLookup(vocabulary=["a", "b", f"of rank {RANK}"])
    inputs = keras.Input((1,), dtype="string")
    hidden = keras.layers.Embedding(5, 2)(lookup(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(hidden)))
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
    words = tf.constant([["a"], ["b"]])
    told = r"StringLookup 'string_lookup.*', vocabulary: rank 0"
    with pytest.raises(ValueError, match=told):
        training.fit(model, data=(words, tf.ones((2, 1))))
