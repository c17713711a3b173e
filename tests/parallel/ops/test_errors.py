"""Wrong calls: the same clear error on every rank, and the next collective works."""

import concurrent.futures
import functools
import logging
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import log

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2, 3)
several = pytest.mark.skipif(SIZE == 1, reason="one rank cannot disagree with itself")


@pytest.fixture(autouse=True)
def _next_collective_is_right():
    yield
    np.testing.assert_array_equal(hvd.allreduce([RANK + 1], op=hvd.Sum), [SIZE * (SIZE + 1) // 2])


# What rank 0 calls with 0, and the others with 1.
DIFFER = [
    (lambda i: hvd.allreduce(tf.ones(2 + i)), ["[2]", "[3]"]),
    (lambda i: hvd.allreduce(tf.ones(2, ["float32", "float64"][i])), ["float32[2]", "float64[2]"]),
    (lambda i: hvd.allreduce(tf.ones(2), op=[hvd.Sum, hvd.Max][i]), ["op=Sum", "op=Max"]),
    (
        lambda i: hvd.allreduce(tf.ones(2), prescale_factor=[0.25, 0.5][i]),
        ["prescale_factor=0.25", "prescale_factor=0.5"],
    ),
    (lambda i: hvd.broadcast(1, i), ["root_rank=0", "root_rank=1"]),
    (lambda i: hvd.allgather(tf.ones((1, 2 + i))), ["[*,2]", "[*,3]"]),
    (lambda i: hvd.grouped_allreduce([tf.ones(2)] * (2 - i)), ["float32[2], float32[2]"]),
]


@several
@pytest.mark.parametrize(("call", "texts"), DIFFER)
def test_ranks_that_differ(call, texts) -> None:
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        call(min(RANK, 1))
    for text in [*texts, *(f"rank {r}: " for r in range(SIZE))]:
        assert text in str(error.value)


adam = functools.partial(hvd.DistributedOptimizer, "adam")


def slices(dtype: str) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones((1, 2), dtype), [0], [3, 2])


# What is wrong, and what is right.
INTEGERS = "int32", "float32"
REFUSED = [
    (
        lambda dtype: hvd.allreduce(tf.ones(2, dtype)),
        INTEGERS,
        "ValueError: hvd.allreduce: got a tensor of dtype int32 with op=hvd.Average",
    ),
    (lambda dtype: hvd.allreduce(slices(dtype)), INTEGERS, "int32 with op=hvd.Average"),
    (
        lambda shape: hvd.allgather(tf.ones(shape), name="rows"),
        ((), 1),
        "ValueError: hvd.allgather: got a scalar",
    ),
    (lambda root: hvd.broadcast(1, root), (99, 0), "root_rank is 99"),
    (
        lambda dtype: hvd.reducescatter(tf.ones(SIZE, dtype)),
        INTEGERS,
        "int32 with op=hvd.Average",
    ),
    (
        lambda value: hvd.alltoall(tf.constant([value] * SIZE)),
        ("a", 0.0),
        "TypeError: hvd.alltoall: got a tensor of dtype string",
    ),
]


@several
@pytest.mark.parametrize(("call", "given", "text"), REFUSED)
def test_a_call_that_one_rank_refuses_fails_on_all(call, given, text) -> None:
    for culprit in (0, SIZE - 1):
        with pytest.raises(tf.errors.FailedPreconditionError) as error:
            call(given[culprit != RANK])
        assert f"rank {culprit}: " in str(error.value)
        assert "refused on this rank, " in str(error.value)
        assert text in str(error.value)
        assert error.value.__cause__ is None or culprit == RANK


@several
def test_two_kinds_with_one_name_are_two_requests() -> None:
    """So ranks may submit them in any order without mixing up their data."""
    calls = [
        lambda: hvd.allreduce(tf.fill([2], RANK + 1), op=hvd.Sum, name="both"),
        lambda: hvd.broadcast(tf.fill([2], RANK + 1), SIZE - 1, name="both"),
    ]
    first = RANK % 2
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(calls[first])
        results = {1 - first: calls[1 - first](), first: under_way.result()}
    np.testing.assert_array_equal(results[0], [SIZE * (SIZE + 1) // 2] * 2)
    np.testing.assert_array_equal(results[1], [SIZE] * 2)


def test_strings_and_ragged_tensors() -> None:
    for call in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0)):
        with pytest.raises(TypeError, match="dtype string, expected one of"):
            call(tf.constant(["text"]))
        with pytest.raises(TypeError, match="got a RaggedTensor, expected a dense tensor"):
            call(tf.ragged.constant([[1.0], [2.0, 3.0]]))


def test_what_is_no_process_set_and_no_variable() -> None:
    calls = {
        "allreduce": lambda: hvd.allreduce(1.0, process_set=[0, 1]),
        "DistributedOptimizer": lambda: hvd.DistributedOptimizer("adam", process_set=[0, 1]),
        "data.shard": lambda: hvd.data.shard(np.ones(8), batch_size=2, process_set=[0, 1]),
        "broadcast_object": lambda: hvd.broadcast_object(1, 0, process_set=[0, 1]),
        "allgather_object": lambda: hvd.allgather_object(1, process_set=[0, 1]),
        "broadcast_preprocessing": lambda: hvd.broadcast_preprocessing([], 0, [0, 1]),
        "layers.Embedding": lambda: hvd.layers.Embedding(9, 2, process_set=[0, 1]),
        "remove_process_set": lambda: hvd.remove_process_set([0, 1]),
    }
    for name, call in calls.items():
        text = rf"hvd.{name}.*: process_set is \[0, 1\], expected an hvd.ProcessSet"
        with pytest.raises(TypeError, match=text):
            call()
    for given, name in ((keras.Sequential(), "Sequential"), ([np.ones(2)], "ndarray")):
        with pytest.raises(TypeError, match=f"got a {name}, expected variables, such as model"):
            hvd.broadcast_variables(given, 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hvd.grouped_allreduce(1.0), "grouped_allreduce: got 1.0, expected a list"),
        (lambda: hvd.grouped_allgather(keras.Variable(1.0)), "expected a list of tensors. For one"),
        (lambda: hvd.allreduce(1.0, name=5), "name is 5, expected a text"),
        (lambda: hvd.allreduce(tf.constant([1j], tf.complex64)), "complex64"),
        *[
            (lambda at=at: hvd.broadcast(1, at), "expected one of the ranks that take part: 0")
            for at in (-1, SIZE, 1.5, None)
        ],
        (lambda: hvd.allreduce([1, 2]), "int32 with op=hvd.Average.*Use op=hvd.Sum"),
        (lambda: hvd.allreduce([1], op=hvd.Sum, prescale_factor=0.5), "prescale_factor"),
        (lambda: hvd.allreduce([True], op=hvd.Sum), "logical"),
        (lambda: hvd.allreduce(1.0, op="sum"), r"expected hvd\.Average"),
        (lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum), "Give op alone"),
        (lambda: hvd.allgather(1.0), "expand_dims"),
        (lambda: hvd.allreduce(slices("float32"), op=hvd.Max), "IndexedSlices"),
        (lambda: hvd.allreduce(1.0, prescale_factor=None), "prescale_factor=None, .* numbers"),
        (lambda: hvd.alltoall(np.ones(SIZE), [[1] * SIZE]), r"splits have the shape \(1, "),
        (lambda: hvd.save_model("x.keras", keras.Sequential()), "expected a name that ends in"),
        (lambda: hvd.save_model("model", "x.keras"), "got 'model', expected a keras.Model"),
        (lambda: hvd.layers.Embeddings([1]), r"tables is \[1\], expected a dict"),
        (lambda: adam(groups="a"), "groups is 'a', expected an integer"),
        (lambda: adam(num_groups=1.5), "groups is 1.5, expected an int"),
        (lambda: adam(gradient_predivide_factor="a"), "is 'a', expected a number above 0"),
    ],
)
def test_wrong_arguments(call, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        call()


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda x: hvd.allreduce(x, "loss", False), ["average is 'loss'", "hvd.allreduce(x, op="]),
        (lambda x: hvd.allreduce(x, hvd.Sum), ["average is <ReduceOp.SUM"]),
        (
            lambda x: hvd.grouped_allreduce([x], True, "", "", hvd.Sum),
            ["compression is <ReduceOp.SUM"],
        ),
        (
            lambda x: hvd.reducescatter(x, "grad", hvd.Sum),
            ["compression is <ReduceOp.SUM", "hvd.reducescatter(x, op="],
        ),
    ],
)
def test_arguments_in_the_positions_of_horovods_keras_modules(call, texts) -> None:
    with pytest.raises(TypeError) as error:
        call(tf.ones(SIZE))
    for text in [*texts, "not that of horovod.keras"]:
        assert text in str(error.value)


def test_grouped_reducescatter_has_horovods_positions() -> None:
    mine = tf.constant(np.arange(1.0, SIZE + 1) * (RANK + 1), tf.float32)
    (result,) = hvd.grouped_reducescatter(
        [mine], "", hvd.Compression.none, hvd.Sum, hvd.global_process_set, 2.0, 0.25
    )
    np.testing.assert_array_equal(result, [(RANK + 1) * 0.5 * SIZE * (SIZE + 1) / 2])


def test_a_broadcast_of_no_variables_warns_once(caplog) -> None:
    log.warn_once.cache_clear()
    log.logger.addHandler(caplog.handler)
    for _ in range(2):
        hvd.broadcast_variables([], 0)
    log.logger.removeHandler(caplog.handler)
    told = caplog.record_tuples
    assert [level for _, level, _ in told] == [logging.WARNING] * (RANK == 0 and SIZE > 1)
    assert all(
        "If the model is not built yet, call it once on a batch" in text for *_, text in told
    )


@several
def test_an_error_that_is_only_printed_does_not_end_the_rank(capsys) -> None:
    """As Cython does it with errors of destructors, and scripts with errors that they caught."""
    if RANK == SIZE - 1:
        try:
            raise RuntimeError("caught and printed")
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            error = ValueError("in a thread")
            pool.submit(sys.excepthook, ValueError, error, None).result()
        printed = capsys.readouterr().err
        assert "RuntimeError: caught and printed" in printed
        assert "ValueError: in a thread" in printed
