"""Collectives and training in functions that XLA compiles."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

import hvd_keras as hvd
from tests.harness import inputs, training

RANK, SIZE = hvd.rank(), hvd.size()
layers, optimizers = keras.layers, keras.optimizers


def compiled(function):
    return tf.function(function, jit_compile=True)


@pytest.fixture(autouse=True)
def _next_collective_is_right():
    yield
    np.testing.assert_array_equal(hvd.allreduce([RANK + 1], op=hvd.Sum), [SIZE * (SIZE + 1) // 2])


def test_every_collective_and_dtype() -> None:
    shape = (2 * SIZE + 1, 3)  # reducescatter: unequal shares
    even = (2 * SIZE, 3)
    dtypes = ["uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]

    @compiled
    def call(tensors, evens, flags):
        results = {
            "sum": hvd.grouped_allreduce(tensors, op=hvd.Sum),
            "max": hvd.grouped_allreduce(tensors, op=hvd.Max, name='a "quoted" näme\\'),
            "broadcast": [hvd.broadcast(x, SIZE - 1) for x in tensors],
            "allgather": hvd.grouped_allgather(tensors),
            "reducescatter": hvd.grouped_reducescatter(tensors, op=hvd.Sum),
            "alltoall": [hvd.alltoall(x) for x in evens],
            "all": hvd.allreduce(flags, op=hvd.Min),
            "scaled": hvd.allreduce(evens[-1], prescale_factor=0.1, postscale_factor=3.0),
            "splits": hvd.alltoall(evens[0], [2] * SIZE)[1],
        }
        if not tf.config.get_visible_devices("GPU"):  # which has no such op under XLA
            results["place"] = [hvd.rank_op(), hvd.size_op()]
        hvd.barrier()
        return results

    def arguments(rank):
        return (
            [tf.cast(inputs.tensor(rank, shape), dtype) for dtype in dtypes],
            [tf.cast(inputs.tensor(rank, even), dtype) for dtype in dtypes],
            tf.constant(inputs.tensor(rank, (20,)) % 2 == 0),
        )

    mine = arguments(RANK)
    got = call(*mine)
    everyone = inputs.of_all_ranks(SIZE, shape)
    total = everyone.sum(0)
    start = RANK * 2 + min(RANK, 1)  # the first rank has the row that is over
    expected = {
        "sum": total,
        "max": everyone.max(0),
        "broadcast": everyone[-1],
        "allgather": everyone.reshape(-1, 3),
        "reducescatter": total[start : start + 2 + (RANK == 0)],
        "alltoall": np.concatenate(
            [inputs.tensor(r, even)[2 * RANK : 2 * RANK + 2] for r in range(SIZE)]
        ),
    }
    for name, value in expected.items():
        assert [x.dtype.name for x in got[name]] == dtypes
        for result in got[name]:
            np.testing.assert_array_equal(tf.cast(result, tf.float64), value)
    flags = [inputs.tensor(r, (20,)) % 2 == 0 for r in range(SIZE)]
    np.testing.assert_array_equal(got["all"], np.all(flags, axis=0))
    mean = inputs.of_all_ranks(SIZE, even, "float64").mean(0)
    np.testing.assert_allclose(got["scaled"], mean * 0.3, rtol=1e-14)
    np.testing.assert_array_equal(got["splits"], [2] * SIZE)
    assert [int(x) for x in got.get("place", [RANK, SIZE])] == [RANK, SIZE]
    for given, fresh in zip(mine[0], arguments(RANK)[0], strict=True):
        np.testing.assert_array_equal(given, fresh)  # not overwritten


def test_gradients_are_those_without_xla() -> None:
    def gradients(x, weight):
        losses = {
            "mean": lambda: hvd.allreduce(x),
            "max": lambda: hvd.allreduce(x, op=hvd.Max),
            "product": lambda: hvd.allreduce(x, op=hvd.Product),
            "broadcast": lambda: hvd.broadcast(x, SIZE - 1),
            "allgather": lambda: hvd.allgather(x),
            "reducescatter": lambda: hvd.reducescatter(x),
            "alltoall": lambda: hvd.alltoall(x),
        }
        results = {}
        for name, function in losses.items():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function()
                loss = tf.reduce_sum(y * y * weight[: tf.shape(y)[0]])
            results[name] = tape.gradient(loss, x)
        return results

    shape = (2 * SIZE, 3)
    x = tf.constant(inputs.tensor(RANK, shape, "float64"))
    weight = tf.constant(inputs.tensor(RANK + 2, (2 * SIZE * SIZE, 3), "float64"))
    expected, got = tf.function(gradients)(x, weight), compiled(gradients)(x, weight)
    for name, value in expected.items():
        assert np.abs(value).max() > 0 or (name == "broadcast" and RANK < SIZE - 1)
        np.testing.assert_allclose(got[name], value, rtol=1e-12, err_msg=name)


def test_order_of_many_tensors(directory) -> None:
    """Without the chain, XLA would run them in a different order in each step."""
    count, steps = 60, 20

    @compiled
    def step(x):
        # XLA runs programs on a few hundred bytes sequentially anyway.
        return [hvd.allreduce(x + i, op=hvd.Sum, name=f"tensor {i}") for i in range(count)]

    hvd.start_timeline(directory / "timeline.json")
    for _ in range(steps):
        step(tf.ones(200))
    hvd.barrier()  # brings what rank 0 does not know yet
    hvd.stop_timeline()
    hvd.barrier()  # rank 0 has written it
    events = json.loads((directory / "timeline.json").read_text())
    mine = [e for e in events if e["ph"] == "X" and e["pid"] == RANK]
    order = [e["name"] for e in sorted(mine, key=lambda e: e["ts"])]
    called = [name for name in order if name.startswith("allreduce tensor ")]
    assert called == [f"allreduce tensor {i}" for i in range(count)] * steps


def test_loops_and_branches_beside_other_collectives() -> None:
    """Nothing orders them: the bodies are separate programs."""

    @compiled
    def step(x, y):
        for i in tf.range(3):
            if tf.reduce_sum(x) < 1e30:
                x = hvd.allreduce(x + tf.cast(i, x.dtype), op=hvd.Sum)
        y = hvd.allreduce(y, op=hvd.Sum)
        for _ in tf.range(2):
            y = hvd.allreduce(y, op=hvd.Sum)
        return x, y, hvd.allgather(y)

    x, y = inputs.tensor(RANK, (4,), "float64"), inputs.tensor(RANK + 1, (4,), "float64")
    expected_x = inputs.of_all_ranks(SIZE, (4,), "float64").sum(0)
    for i in (1, 2):
        expected_x = SIZE * (expected_x + i)
    expected_y = SIZE**2 * sum(inputs.tensor(r + 1, (4,), "float64") for r in range(SIZE))
    for _ in range(20):
        got = step(tf.constant(x), tf.constant(y))
        np.testing.assert_array_equal(got[0], expected_x)
        np.testing.assert_array_equal(got[1], expected_y)
        np.testing.assert_array_equal(got[2], np.tile(expected_y, SIZE))


def test_calls_without_a_use_run_and_equal_calls_stay_two() -> None:
    @compiled
    def step(x):
        hvd.allreduce(x, name="unused first")
        y = hvd.allreduce(x, name="twice") + hvd.allreduce(x, name="twice")
        hvd.allreduce(x, name="unused last")
        return y

    def served() -> int:
        return hvd.stats()["collectives"]["allreduce"]["requests"]

    x = tf.fill([2], RANK + 1.0)
    step(x)
    before = served()
    np.testing.assert_allclose(step(x), [SIZE + 1] * 2)
    assert served() == before + 4


def test_ranks_that_differ() -> None:
    with pytest.raises(tf.errors.OpError) as error:
        compiled(lambda: hvd.allreduce(tf.ones(2 + RANK)))()
    for text in ("rank 0: op=Average float32[2]", "rank 1: op=Average float32[3]"):
        assert text in str(error.value)


@pytest.mark.parametrize("call", [hvd.allgather, hvd.alltoall])
def test_numbers_of_rows_that_differ(call) -> None:
    with pytest.raises(tf.errors.OpError, match=r"jit_compile=False"):
        compiled(call)(tf.ones((SIZE * (2 + RANK), 3)))


def test_what_xla_cannot_express_is_refused() -> None:
    x = tf.range(SIZE + 1.0)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"known only when .*jit_compile=False"
    ):
        compiled(lambda x: hvd.allgather(tf.boolean_mask(x, x > 0.5)))(x)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"splits are known only when"):
        compiled(hvd.alltoall)(x, tf.constant([1] * (SIZE - 1) + [2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"its splits differ"):
        compiled(lambda x: hvd.alltoall(x, [1] * (SIZE - 1) + [2]))(x)


@pytest.mark.parametrize("splits", [[2] * SIZE, [3] * (2 * SIZE), [1]])
def test_splits_that_do_not_fit(splits) -> None:
    wrong = r"got (\d+ splits, expected|splits that)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=wrong):
        compiled(lambda x: hvd.alltoall(x, splits)[0])(tf.ones((6 * SIZE, 2)))


@pytest.mark.parametrize("call", [hvd.allgather, hvd.reducescatter])
def test_a_scalar_of_unknown_rank(call) -> None:
    function = tf.function(call, jit_compile=True, input_signature=[tf.TensorSpec(None)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"got a scalar"):
        function(1.0 + RANK)


def lowered_for_gpus(function, *arguments):
    """Returns the lowered computation; TensorFlow needs no GPU for this."""
    lower = compiled(function).experimental_get_compiler_ir(*arguments)
    module = hlo_pb2.HloModuleProto.FromString(lower(stage="hlo_serialized", platform_name="GPU"))
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def test_what_xla_gets_for_gpus() -> None:
    """tests/gpu/xla.py lets it compile and run such programs."""

    def call(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            a = hvd.allreduce(x, name="a")
            b, c = hvd.grouped_allreduce([a, y], name="b", op=hvd.Sum)
            d = hvd.allgather(b, name="d")
            e = hvd.broadcast(b, SIZE - 1, name="e")
            f = hvd.reducescatter(b, name="f")
            g = hvd.alltoall(b, name="g")
            loss = sum(tf.reduce_sum(z * z) for z in (d, e, f, g))
        hvd.allreduce(y, name="unused", op=hvd.Max)
        return c, tape.gradient(loss, x)

    rows = 2 * SIZE
    computation = lowered_for_gpus(call, tf.ones((rows, 3)), tf.ones((4,), tf.int64))
    instructions = {i.id: i for i in computation.instructions}
    calls = [i for i in computation.instructions if i.opcode == "custom-call"]
    names = [re.search(r'tensor_name = "(.*?)"', i.backend_config.decode())[1] for i in calls]
    assert hvd.allgather_object(names) == [names] * SIZE
    forward = ["a", "b", "d", "e", "f", "g", "unused"]
    assert sorted(name for name in names if "gradient" not in name) == forward
    backward = ["a.gradient", "b.gradient", "d.gradient", "e.gradient", "f.gradient", "g.gradient"]
    assert set(backward) <= set(names)
    shapes = {}
    for before, call, name in zip([None, *calls], calls, names, strict=False):
        assert call.custom_call_target == "hvd_collective"
        assert call.custom_call_has_side_effect
        assert call.custom_call_api_version == hlo_pb2.API_VERSION_TYPED_FFI
        arguments, results = call.operand_shapes_with_layout, call.shape.tuple_shapes
        for shape in (*arguments, *results):
            order = list(shape.layout.minor_to_major)
            assert order == list(reversed(range(len(shape.dimensions))))
            assert not any(shape.is_dynamic_dimension)
        # The chain comes from the previous call and goes to the next.
        end = instructions[call.operand_ids[-1]]
        if before is None:
            assert end.opcode == "constant"
        else:
            last = len(before.shape.tuple_shapes) - 1
            assert (list(end.operand_ids), end.tuple_index) == ([before.id], last)
        kept = re.search(r"Hvd(Allreduce|Broadcast)", call.backend_config.decode())
        shared = range(len(results)) if kept else [len(results) - 1]
        offset = len(arguments) - len(results)
        aliases = [
            (list(a.output_shape_index), a.operand_index, list(a.operand_shape_index))
            for a in call.output_operand_aliasing
        ]
        assert aliases == [([i], i + offset, []) for i in shared]
        shapes[name] = [list(shape.dimensions) for shape in results[:-1]]
    assert shapes["b"] == [[rows, 3], [4]]
    assert shapes["d"] == [[rows * SIZE, 3]]
    assert shapes["f"] == [[2, 3]]
    assert shapes["e"] == shapes["g"] == shapes["a.gradient"] == [[rows, 3]]


def test_what_xla_cannot_express_for_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hvd.rank_op.* numbers hvd.rank\(\).*jit_compile=False"):
        lowered_for_gpus(lambda: hvd.rank_op() + 1)


def train(make_model, optimizer, rows=None, overflows=False) -> keras.Model:
    """Returns the model after training on this rank's shard."""
    net = make_model()
    training.set_weights(net, seed=RANK)  # the broadcast must make them equal
    x, y = (part[:rows] for part in training.mine(net))
    if overflows and RANK == SIZE - 1:
        y[0] = 1e30
    training.fit(training.compiled(net, optimizer, jit_compile=True), data=(x, y))
    assert net.jit_compile
    training.assert_bit_identical_on_all_ranks(net)
    return net


def image_model(dropout: float) -> keras.Model:
    # The gradient of a bias here would be rounding noise, which Adam would turn into steps.
    convolution = [layers.Reshape((5, 1)), layers.Conv1D(3, 3, use_bias=False)]
    others = [layers.BatchNormalization(), layers.Dropout(dropout, seed=1), layers.Flatten()]
    return keras.Sequential([keras.Input((5,)), *convolution, *others, layers.Dense(1)])


def test_dropout() -> None:
    """With XLA, TensorFlow draws other random numbers, so only the ranks are compared."""
    net = train(lambda: image_model(0.3), optimizers.Adam(0.01))
    mask = compiled(lambda x: net.layers[3](x, training=True))(tf.ones((50, 3, 3)))
    masks = hvd.allgather(mask[tf.newaxis]).numpy()
    assert len(np.unique(masks, axis=0)) == SIZE


def test_loss_scaling_skips_a_step_that_overflows_on_one_rank() -> None:
    def make():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return training.dense_model()
        finally:
            keras.config.set_dtype_policy("float32")

    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.05), initial_scale=64.0)
    net = train(make, scaled, overflows=True)
    assert np.isfinite(training.flat(net)).all()
    assert float(net.optimizer.dynamic_scale) == 32.0


def test_sparse_gradients_of_unequal_batches_are_refused() -> None:
    rows = training.BATCH * training.STEPS - RANK
    with pytest.raises(tf.errors.OpError, match=r"sparse_as_dense=True"):
        train(training.sparse_model, optimizers.SGD(0.1), rows=rows)
