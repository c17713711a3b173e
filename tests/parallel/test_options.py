"""Horovod's options of the optimizer and the tape, objects, synchronised batch normalisation."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import agreement
from hvd_keras.runtime import libraries
from tests.harness import inputs, training

RANK, SIZE = hvd.rank(), hvd.size()
optimizers = keras.optimizers


def applied(gradients: list, **options) -> list[np.ndarray]:
    """Returns what is subtracted from zero variables when all ranks apply their gradients."""
    variables = [keras.Variable(tf.zeros_like(tf.convert_to_tensor(g))) for g in gradients]
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), **options)
    optimizer.build(variables)
    tf.function(lambda: optimizer.apply(gradients))()
    return [-v.numpy() for v in variables]


def mean(shape: tuple[int, ...]) -> np.ndarray:
    return inputs.of_all_ranks(SIZE, shape).mean(0)


def gradients() -> list:
    return [tf.constant(inputs.tensor(RANK, shape)) for shape in ((4,), (3, 2), (), (5,))]


@pytest.mark.parametrize(
    ("compression", "error"), [("none", 1e-6), ("fp16", 2**-10), ("bf16", 2**-7)]
)
def test_compression_keeps_to_its_error_bound(compression: str, error: float) -> None:
    values = [np.cos(np.arange(500.0) + r) + 2 for r in range(SIZE)]
    mine = tf.constant(values[RANK], tf.float32)
    (got,) = applied([mine], compression=getattr(hvd.Compression, compression))
    exact = np.mean(values, axis=0)
    np.testing.assert_allclose(got, exact, rtol=error)
    reduced = hvd.allreduce(mine, compression=getattr(hvd.Compression, compression))
    assert reduced.dtype == tf.float32
    np.testing.assert_allclose(reduced, exact, rtol=error)
    if compression != "none":
        assert not np.allclose(reduced, exact, rtol=error / 1000), "nothing was compressed"
    np.testing.assert_array_equal(reduced, got)


@pytest.mark.host("NCCL sums in the dtype that is sent")
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compression_keeps_to_its_error_bound_over_the_whole_range(
    compression: str, dtype: str
) -> None:
    how, half = getattr(hvd.Compression, compression), compression == "fp16"
    unit, tiny = (2.0**-11, 2.0**-25) if half else (2.0**-8, 0.0)
    random = np.random.default_rng(5)  # the same on all ranks, each of which takes a row
    exponents = random.uniform(-30, 15, 20000) if half else random.uniform(-100, 100, 20000)
    values = random.uniform(-1, 1, (SIZE, 20000)) * 2**exponents
    values[:, :2] = 0.0
    values = values.astype(dtype)
    got = hvd.allreduce(tf.constant(values[RANK]), compression=how, name="range")
    assert got.dtype == dtype
    values = values.astype(np.float64)
    exact = values.mean(0)
    bound = unit * (np.abs(values).mean(0) + np.abs(exact)) + 2 * tiny
    bound += SIZE * 2.0**-24 * np.abs(values).mean(0)  # the sum, in float32
    assert (np.abs(got - exact) <= bound).all()
    assert (np.abs(got - exact) > bound / 4).any(), "nothing was compressed"
    np.testing.assert_array_equal(got[:2], 0.0)


def test_compression_beyond_the_range_gives_infinity_to_all_ranks() -> None:
    def one(rank: int, value: float) -> float:
        return value if rank == RANK else 1.0

    mine = [one(0, 65519.0), one(1, 65520.0), one(0, -1e30), one(1, np.inf), one(0, np.nan), 1.0]
    fp16 = hvd.allreduce(tf.constant(mine), op=hvd.Sum, compression=hvd.Compression.fp16)
    large = 65504.0 if SIZE < 17 else np.inf  # 65519 is rounded to 65504; with the ones, again
    np.testing.assert_array_equal(fp16, [large, np.inf, -np.inf, np.inf, np.nan, SIZE])
    bf16 = hvd.allreduce(tf.constant(mine), op=hvd.Sum, compression=hvd.Compression.bf16)
    assert np.isfinite(bf16.numpy()[:3]).all()
    np.testing.assert_array_equal(bf16[3:], [np.inf, np.nan, SIZE])


@pytest.mark.host("for NCCL, TensorFlow casts")
def test_ranks_that_compress_differently_get_an_error() -> None:
    how = hvd.Compression.fp16 if RANK == 0 else hvd.Compression.none
    with pytest.raises(tf.errors.FailedPreconditionError, match="compression=float16 float32"):
        hvd.allreduce(tf.ones(3), compression=how, name="differs")


@pytest.mark.host("for NCCL, TensorFlow casts")
def test_compression_adds_no_ops_and_a_compressor_of_a_derived_class_is_called() -> None:
    class Mine(hvd.Compression.fp16):
        pass

    def casts(compression) -> int:
        with tf.Graph().as_default() as graph:
            hvd.allreduce(tf.ones(4), compression=compression, name="ops")
        return sum(op.type == "Cast" for op in graph.get_operations())

    assert casts(hvd.Compression.fp16) == 0
    assert casts(Mine) == 2


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression_of_sparse_gradients_and_integers(compression: str) -> None:
    row = inputs.tensor(RANK, (1, 2))
    slices = tf.IndexedSlices(tf.constant(row), [RANK], [SIZE, 2])
    how = getattr(hvd.Compression, compression)
    (got,) = applied([slices], compression=how)
    expected = np.concatenate([inputs.tensor(r, (1, 2)) for r in range(SIZE)]) / SIZE
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    integers = hvd.allreduce(tf.constant([70000 + RANK]), op=hvd.Sum, compression=how)
    np.testing.assert_array_equal(integers, [sum(70000 + r for r in range(SIZE))])


def test_a_compression_of_the_users() -> None:
    class Halves(hvd.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor / 2, "context"

        @staticmethod
        def decompress(tensor, context):
            assert context == "context"
            return tensor * 4

    (got,) = applied([tf.constant(inputs.tensor(RANK, (4,)))], compression=Halves)
    np.testing.assert_allclose(got, 2 * mean((4,)), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_predivide_factor": 4.0},
        {"num_groups": 1},
        {"num_groups": 3},
        {"groups": 2},
        {"num_groups": 100},
        {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"},
        {"name": "mine"},
    ],
)
def test_options_that_do_not_change_the_result(options: dict) -> None:
    for got, shape in zip(applied(gradients(), **options), ((4,), (3, 2), (), (5,)), strict=True):
        np.testing.assert_allclose(got, mean(shape), rtol=1e-6)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("xla", [False, True])
def test_on_a_gpu_all_buckets_are_awaited_once(monkeypatch, compression: str, xla: bool) -> None:
    """As if there was a GPU: on a CPU each bucket's call waits, and what follows only passes on."""
    if xla and (problem := libraries.why_no_xla()):
        pytest.skip(problem)
    monkeypatch.setattr(agreement, "has_gpu", lambda: True)
    rows = tf.IndexedSlices(tf.fill((1, 2), RANK + 1.0), tf.constant([RANK]), (SIZE, 2))
    given = [*gradients(), rows]
    variables = [keras.Variable(tf.zeros_like(tf.convert_to_tensor(g))) for g in given]
    options = {"compression": getattr(hvd.Compression, compression), "num_groups": 3}
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), **options)
    optimizer.build(variables)
    step = tf.function(lambda: optimizer.apply(given), jit_compile=xla)
    step()
    expected = [mean(tuple(g.shape)) for g in given[:-1]]
    expected.append(np.repeat(np.arange(1.0, SIZE + 1)[:, np.newaxis], 2, axis=1) / SIZE)
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(-variable.numpy(), value, rtol=2**-10, atol=1e-3)
    operations = step.get_concrete_function().graph.get_operations()
    waits = {op.get_attr("waits") for op in operations if op.type == "HvdAllreduce"}
    awaited = [len(op.inputs) for op in operations if op.type == "HvdWait"]
    # Of what is rounded outside the op, each bucket is needed at once.
    assert (waits, awaited) == (({False}, [4]) if compression == "none" else ({True}, []))


def test_groups_of_variables_share_a_request() -> None:
    variables = [keras.Variable(np.zeros(3, "float32"), name=f"v{i}") for i in range(4)]
    optimizer = hvd.DistributedOptimizer(
        optimizers.SGD(1.0), groups=[[variables[0], variables[3]], [variables[1]]]
    )
    optimizer.build(variables)
    step = tf.function(lambda: optimizer.apply([tf.fill([3], RANK + i + 1.0) for i in range(4)]))
    step()
    for i, v in enumerate(variables):
        np.testing.assert_allclose(v, -np.full(3, np.mean(np.arange(SIZE)) + i + 1), rtol=1e-6)
    operations = step.get_concrete_function().graph.get_operations()
    counts = [len(op.inputs) for op in operations if op.type == "HvdAllreduce"]
    assert sorted(counts) == [1, 1, 2]


@pytest.mark.parametrize("scaled", [False, True])
def test_local_variables_keep_their_gradient(scaled: bool) -> None:
    local = keras.Variable(np.zeros((2 + RANK,), "float32"))  # of another shape on each rank
    shared = keras.Variable(np.zeros((3,), "float32"))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), scale_local_gradients=scaled)
    optimizer.register_local_var(local)
    optimizer.build([local, shared])
    step = tf.function(
        lambda: optimizer.apply([tf.fill([2 + RANK], RANK + 1.0), tf.fill([3], RANK + 1.0)])
    )
    step()
    expected = (RANK + 1) / (SIZE if scaled else 1)
    np.testing.assert_allclose(local, np.full(2 + RANK, -expected), rtol=1e-6)
    np.testing.assert_allclose(shared, np.full(3, -(SIZE + 1) / 2), rtol=1e-6)


def test_partial_optimizer_and_tape() -> None:
    layers = [keras.layers.Dense(2, use_bias=False), keras.layers.Dense(2, use_bias=False)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    training.set_weights(model, seed=0)
    x = tf.constant(inputs.tensor(RANK, (3, 2)))

    def gradients(wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        return wrap(tape).gradient(loss, model.trainable_variables)

    mine = gradients(lambda tape: tape)
    everyone = [hvd.allreduce(g).numpy() for g in mine]
    local, shared = gradients(
        lambda tape: hvd.PartialDistributedGradientTape(
            tape, local_layers=layers[0], scale_local_gradients=False
        )
    )
    np.testing.assert_allclose(local, mine[0], rtol=1e-6)
    np.testing.assert_allclose(shared, everyone[1], rtol=1e-6)

    before = [w.copy() for w in model.get_weights()]
    optimizer = hvd.PartialDistributedOptimizer(
        optimizers.SGD(0.5), local_layers=[layers[1]], scale_local_gradients=False
    )
    optimizer.apply(mine, model.trainable_variables)
    after = model.get_weights()
    np.testing.assert_allclose(after[0], before[0] - 0.5 * everyone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after[1], before[1] - 0.5 * mine[1].numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no variables yet"):
        hvd.PartialDistributedOptimizer(optimizers.SGD(), local_layers=keras.layers.Dense(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "fp16"}, "expected hvd.Compression"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "Leave one of them out"),
        ({"num_groups": 2, "groups": 2}, "Give groups alone"),
        ({"groups": -1}, "or 0 to group by size"),
        ({"groups": [1, 2]}, "lists of variables"),
        ({"backward_passes_per_step": 0}, "a positive integer"),
    ],
)
def test_impossible_options(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(optimizers.SGD(), **options)
    if "backward_passes_per_step" not in options:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)


def test_backward_passes_beside_keras_accumulation() -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 already"):
        hvd.DistributedOptimizer(
            optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=3
        )


def test_objects() -> None:
    mine = {"rank": RANK, "text": "x" * (RANK * 1000), "array": inputs.tensor(RANK, (3,))}
    everyone = hvd.allgather_object(mine)
    assert [(o["rank"], len(o["text"])) for o in everyone] == [(r, 1000 * r) for r in range(SIZE)]
    np.testing.assert_array_equal(everyone[-1]["array"], inputs.tensor(SIZE - 1, (3,)))
    for root in range(SIZE):
        got = hvd.broadcast_object(mine, root, name="mine")
        assert (got["rank"], len(got["text"])) == (root, 1000 * root)
    double = hvd.broadcast_object(lambda x: 2 * x + RANK, 0)  # a closure travels, too
    assert double(3) == 6
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast_object(mine, SIZE)


def test_a_model_of_hdf5_is_refused_because_keras_forgets_its_optimizer(tmp_path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    model.fit(np.ones((4, 3)), np.full((4, 1), RANK), verbose=0)
    model.save(tmp_path / "model.h5")
    with pytest.raises(ValueError, match=r"does not restore the optimizer .* Save .* as \.keras"):
        hvd.load_model(tmp_path / "model.h5")


def test_load_model_needs_an_optimizer(tmp_path) -> None:
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "bare.keras")
    with pytest.raises(ValueError, match="has no optimizer"):
        hvd.load_model(tmp_path / "bare.keras")


def test_load_model_takes_an_optimizer_that_its_maker_has_distributed(tmp_path) -> None:
    @keras.saving.register_keras_serializable()
    class OwnSGD(optimizers.SGD):
        @classmethod
        def from_config(cls, config, custom_objects=None):
            return hvd.DistributedOptimizer(cls(**config))

    model = training.dense_model()
    training.set_weights(model, seed=0)
    model.compile(optimizer=OwnSGD(0.01), loss="mse")
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    loaded.fit(*training.mine(loaded), verbose=0)
    training.assert_bit_identical_on_all_ranks(loaded)


def test_plain_batch_normalisation_stays_local() -> None:
    layer = keras.layers.BatchNormalization(momentum=0.0)
    layer.build((None, 1))
    layer(np.full((3, 1), RANK + 1.0), training=True)
    np.testing.assert_allclose(layer.moving_mean, [RANK + 1.0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("known_length", [False, True])
def test_moving_statistics_are_averaged_before_they_are_saved(known_length: bool) -> None:
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    training.set_weights(model, seed=0)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizers.SGD(0.01)), loss="mse")
    x, y = training.mine(model)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(model.layers[1].moving_mean.numpy())
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(training.BATCH)
    if not known_length:
        data = data.filter(lambda x, y: True)
    model.fit(data, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), look])
    everyone = hvd.allgather_object(seen[0])
    assert np.abs(everyone[0]).max() > 0
    for theirs in everyone:
        np.testing.assert_array_equal(theirs, everyone[0])
    training.assert_bit_identical_on_all_ranks(model)


def test_learning_rates_grow_with_the_size() -> None:
    assert hvd.linear_scaling(0.1) == pytest.approx(0.1 * SIZE)
    assert hvd.sqrt_scaling(0.1) ** 2 == pytest.approx(0.01 * SIZE)


def test_masked_synchronised_batch_normalisation_is_refused() -> None:
    layer = hvd.SyncBatchNormalization()
    with pytest.raises(ValueError, match="which is not supported"):
        layer(np.ones((2, 3, 4)), training=True, mask=np.ones((2, 3), bool))
