"""Horovod's names with Horovod's meaning, where that differs from ours."""

import copy
import os
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras
import hvd_keras.horovod

hvd_keras.horovod.install()

import horovod.common.util  # noqa: E402
import horovod.keras  # noqa: E402
import horovod.runner.common.util.env  # noqa: E402
import horovod.tensorflow as hvd  # noqa: E402
import horovod.tensorflow.keras  # noqa: E402

RANK, SIZE = hvd_keras.rank(), hvd_keras.size()
pytestmark = pytest.mark.ranks(1, 2, 3)
KERAS_MODULES = [horovod.keras, horovod.tensorflow.keras]
INTEGERS = [tf.uint8, tf.int8, tf.int32, tf.int64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_averages_of_integers_are_truncated(dtype) -> None:
    signed = dtype not in (tf.uint8,)
    values = np.array([5, 7, 0, 3 * SIZE]) + RANK * np.array([1, 0, 1, 0])
    if signed:
        values[1] = -7 - RANK
    total = sum(
        np.array([5 + r, -7 - r if signed else 7, r, 3 * SIZE]).astype(int) for r in range(SIZE)
    )
    mean = hvd.allreduce(tf.cast(values, dtype), name="integers")
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, np.trunc(total / SIZE))


def test_the_average_of_sparse_integers_is_not_truncated() -> None:
    slices = tf.IndexedSlices(tf.constant([[RANK], [1]]), tf.constant([0, 2]), tf.constant([3, 1]))
    mean = hvd.allreduce(slices, op=hvd.Average)
    np.testing.assert_allclose(tf.convert_to_tensor(mean)[:, 0], [(SIZE - 1) / 2, 0, 1])
    total = hvd.allreduce(slices, op=hvd.Sum)
    assert total.values.dtype == tf.int32


def test_an_optimizer_is_wrapped_twice() -> None:
    plain = tf.keras.optimizers.Adam(0.25)
    one, two = hvd.DistributedOptimizer(plain), hvd.DistributedOptimizer(plain)
    assert one is not two
    assert float(two.learning_rate) == 0.25
    for optimizer in (one, two):
        variable = tf.Variable([1.0])
        optimizer.apply_gradients([(tf.constant([RANK - 5.0]), variable)])
        np.testing.assert_allclose(variable, [1.25], rtol=1e-5)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_optimizer_that_accumulates_is_wrapped_again(is_scaled: bool) -> None:
    plain = keras.optimizers.SGD(0.25)
    if is_scaled:
        plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=1.0)
    for passes in (2, 3, 1):
        variable = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes)
        for _ in range(passes):
            np.testing.assert_array_equal(variable, [0.0])
            optimizer.apply([tf.constant([RANK - 5.0])], [variable])
        np.testing.assert_allclose(variable, [0.25 * passes * (5 - (SIZE - 1) / 2)])


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to add to")
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_the_tape_has_summed_are_not_summed_again(compiled: bool) -> None:
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.build([variable])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = variable * (RANK + 1.0)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        optimizer.apply_gradients(zip(tape.gradient(loss, [variable]), [variable], strict=True))

    (tf.function(step) if compiled else step)()
    np.testing.assert_array_equal(variable, [-SIZE * (SIZE + 1) / 2])


def test_variables_that_horovodrun_sets() -> None:
    assert os.environ["HOROVOD_RANK"] == str(RANK)
    assert os.environ["HOROVOD_SIZE"] == str(SIZE)
    assert os.environ["HOROVOD_LOCAL_RANK"] == str(hvd.local_rank())


def test_an_init_that_raised_leaves_no_process_sets() -> None:
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([0])]
    if SIZE == 1:
        return  # its set of all ranks is that
    with pytest.raises(ValueError, match="has the same ranks"):
        hvd.init(process_sets=sets)
    alone = hvd.ProcessSet([0])
    hvd.init(process_sets=[alone])
    assert alone.process_set_id is not None
    hvd.remove_process_set(alone)


def test_scale_factors_of_integers_are_truncated() -> None:
    values = tf.constant([3, 10], tf.int32) + RANK
    result = hvd.allreduce(values, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    halves = sum(np.trunc(np.array([3, 10]) / 2 + r / 2) for r in range(SIZE))
    np.testing.assert_array_equal(result, np.trunc(halves * 1.5))


def test_a_group_may_mix_integers_with_floats() -> None:
    values = tf.constant(RANK + 1), tf.constant(RANK / 1)
    integer, real = hvd.grouped_allreduce(value for value in values)
    assert int(integer) == (SIZE + 1) // 2
    assert float(real) == (SIZE - 1) / 2


def test_what_is_no_process_set_is_told() -> None:
    for call in (
        lambda: hvd.allreduce(1.0, process_set=[0]),
        lambda: hvd.broadcast_object(1, 0, process_set="all"),
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), process_set=[0]),
        lambda: hvd.remove_process_set([0]),
    ):
        with pytest.raises(TypeError, match=r"process_set is .*, expected an hvd\.ProcessSet"):
            call()


def test_reducescatter_truncates_integers() -> None:
    share = hvd.reducescatter(tf.fill([SIZE, 2], 2 * RANK + 1))
    np.testing.assert_array_equal(share, [[SIZE, SIZE]])
    share = hvd.reducescatter(tf.fill([SIZE], RANK + 2))
    np.testing.assert_array_equal(share, [int((SIZE * 2 + SIZE * (SIZE - 1) / 2) / SIZE)])


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_reducescatter_refuses_other_reductions(dtype: str) -> None:
    rows = tf.ones([SIZE, 2], dtype)
    with pytest.raises(NotImplementedError, match=r"expected hvd\.Average or hvd\.Sum"):
        hvd.reducescatter(rows, op=hvd.Min, prescale_factor=2.0)


@pytest.mark.parametrize("mode", ["eager", "tf.function", "TensorFlow 1"])
def test_gradients_have_horovods_scale(mode) -> None:
    x = tf.Variable(np.full([SIZE, 2], 1.0 + RANK, np.float32))

    def derivative(collective):
        if mode == "TensorFlow 1":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                constant = tf.constant(np.full([SIZE, 2], 1.0 + RANK, np.float32))
                loss = tf.reduce_sum(collective(constant) * (RANK + 1.0))
                return session.run(tf.gradients(loss, constant)[0])

        def gradient():
            with tf.GradientTape() as tape:
                y = collective(x)
                # The weights differ by rank.
                loss = tf.reduce_sum(y * (RANK + 1.0))
            return tape.gradient(loss, x)

        return np.asarray((tf.function(gradient) if mode == "tf.function" else gradient)())

    mean = (SIZE + 1) / 2  # of the ranks' weights
    np.testing.assert_allclose(derivative(hvd.allgather), np.full([SIZE, 2], mean))
    expected = mean if RANK == 0 else 0.0
    np.testing.assert_allclose(
        derivative(lambda x: hvd.broadcast(x, 0)), np.full([SIZE, 2], expected)
    )
    rows = np.repeat(np.arange(1.0, SIZE + 1), 2).reshape(SIZE, 2)
    np.testing.assert_allclose(derivative(lambda x: hvd.reducescatter(x, op=hvd.Sum)), rows * SIZE)
    np.testing.assert_allclose(derivative(lambda x: hvd.reducescatter(x)), rows)
    np.testing.assert_allclose(derivative(hvd.allreduce), np.full([SIZE, 2], mean))


def test_objects_arrive_as_they_were_sent() -> None:
    mine = {"a": RANK, 3: [RANK]}  # keys that cannot be sorted
    assert hvd.broadcast_object(mine, SIZE - 1) == {"a": SIZE - 1, 3: [SIZE - 1]}
    assert hvd.allgather_object(mine)[0] == {"a": 0, 3: [0]}


def test_broadcast_in_place() -> None:
    variables = [tf.Variable([RANK + 1.0]), tf.Variable(RANK + 5)]
    values = hvd.broadcast_(variables, SIZE - 1)
    for got in (variables, values):
        np.testing.assert_array_equal(got[0], [SIZE])
        np.testing.assert_array_equal(got[1], SIZE + 4)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum])
def test_slices_with_another_op_are_not_implemented(op) -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0 + RANK]]), tf.constant([0]), tf.constant([3, 1]))
    with pytest.raises(NotImplementedError, match=r"hvd\.Average or hvd\.Sum"):
        hvd.allreduce(slices, op=op)


@pytest.mark.skipif(SIZE == 1, reason="no other rank waits")
def test_an_error_of_one_rank_is_one_of_all() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]), tf.constant([3, 1]))
    with pytest.raises(tf.errors.FailedPreconditionError, match="NotImplementedError"):
        hvd.allreduce(slices if RANK == 0 else tf.ones([3, 1]), op=hvd.Max)
    with pytest.raises(tf.errors.FailedPreconditionError):  # horovod.keras's order of arguments
        hvd.allreduce(1.0 + RANK, "loss" if RANK == 0 else None)
    with pytest.raises(tf.errors.FailedPreconditionError, match="int32"):
        hvd.allreduce(tf.constant(1) if RANK == 0 else tf.constant(1.0))


@pytest.mark.skipif(SIZE == 1, reason="every rank is in every set")
def test_a_rank_outside_of_a_process_set() -> None:
    first = hvd.add_process_set([0])
    optimizer = keras.optimizers.SGD(1.0)
    weight = tf.Variable(1.0 + RANK)
    if first.included():
        assert int(hvd.allreduce(3, op=hvd.Sum, process_set=first)) == 3
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
            hvd.allreduce(3, op=hvd.Sum, process_set=first)
        for call in (
            lambda: hvd.broadcast_variables([weight], 0, process_set=first),
            lambda: hvd.broadcast_object(1, 0, process_set=first),
            lambda: hvd.broadcast_object_fn(0, process_set=first)(1),
            lambda: hvd.allgather_object(1, process_set=first),
            lambda: hvd.barrier(process_set=first),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
                call()
        assert hvd.DistributedOptimizer(optimizer, process_set=first) is optimizer
    with tf.GradientTape() as plain:
        loss = weight * (RANK + 2.0)
    none = hvd.Compression.none
    tape = hvd.DistributedGradientTape(plain, "", "", none, False, hvd.Sum, 1.0, 0, None, first)
    assert float(tape.gradient(loss, weight, None, True)) == RANK + 2.0
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)


@pytest.mark.parametrize("is_graph", [False, True])
def test_local_and_global_gradients(is_graph: bool) -> None:
    own, shared = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    for layer in (own, shared):
        layer.build((None, 1))
        layer.kernel.assign([[1.0]])

    def gradients(make, **options):
        with tf.GradientTape() as plain:
            loss = (RANK + 1.0) * (own(tf.ones((1, 1))) + 2.0 * shared(tf.ones((1, 1))))
        sources = [shared.kernel.value, own.kernel.value]
        tape = make(plain, **options)
        local, others = tape.get_local_and_global_gradients(loss, sources, None, True)
        assert [id(source) for source, _ in local + others] == [id(x) for x in sources[::-1]]
        return [gradient for _, gradient in local + others]

    def registered(plain):
        tape = hvd.DistributedGradientTape(plain)
        tape.register_local_source(own.kernel.value)
        return tape

    def by_position(plain, **options):
        none = hvd.Compression.none
        return hvd.PartialDistributedGradientTape(
            plain, "", "", none, False, hvd.Sum, 1.0, 0, None, hvd.global_process_set, own, False
        )

    means = [(RANK + 1) / SIZE, SIZE + 1]
    for make, options, expected in (
        (registered, {}, means),
        (hvd.PartialDistributedGradientTape, {"local_layers": [own]}, means),
        (by_position, {}, [RANK + 1, SIZE * (SIZE + 1)]),
    ):
        step = tf.function(gradients) if is_graph else gradients
        np.testing.assert_allclose(np.ravel(step(make, **options)), expected, rtol=1e-6)
    for make in (hvd.PartialDistributedGradientTape, horovod.keras.PartialDistributedOptimizer):
        for layers in ("dense", ["dense"]):
            with pytest.raises(ValueError, match="has 'dense', expected layers of Keras"):
                make(tf.GradientTape(), local_layers=layers)


@pytest.mark.parametrize("module", KERAS_MODULES, ids=lambda module: module.__name__)
def test_collectives_of_the_keras_modules(module) -> None:
    """Their second argument is the name."""
    value = RANK + 1.0
    mean, total = (SIZE + 1) / 2, SIZE * (SIZE + 1) / 2
    assert float(module.allreduce(value, "loss")) == mean
    assert float(module.allreduce(value, "loss", False)) == total
    assert float(module.allreduce(value=value, name="loss", op=hvd.Max)) == SIZE
    assert int(module.allreduce(RANK + 1, "count", average=False)) == total
    np.testing.assert_array_equal(module.allgather(value=[RANK], name="ranks"), np.arange(SIZE))
    assert int(module.broadcast(value=RANK, root_rank=SIZE - 1, name="last")) == SIZE - 1
    rows = np.full([SIZE, 1], value, np.float32)
    np.testing.assert_array_equal(module.reducescatter(rows, "rows", hvd.Sum), [[total]])
    np.testing.assert_array_equal(module.reducescatter(rows, "rows"), [[mean]])


def test_values_of_the_keras_modules_in_a_graph() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=1.0 + RANK)
        session.run(tf.compat.v1.global_variables_initializer())
        assert horovod.keras.allreduce(RANK + 1.0, "loss") == (SIZE + 1) / 2
        horovod.keras.broadcast_global_variables(SIZE - 1)
        assert session.run(weight) == SIZE
        assignment = hvd.broadcast_([weight], 0)
        assert session.run(assignment) == [SIZE]


def test_local_variables_keep_their_values() -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for variable in model.variables:
        variable.assign(np.full(variable.shape, RANK + 1.0))
    local = model.layers[1].variables
    callback = horovod.tensorflow.keras.callbacks.BroadcastGlobalVariablesCallback(
        0, device="", local_variables=local[0]
    )
    callback.register_local_var(local[1])
    callback.set_model(model)
    callback.on_train_begin()
    for variable in model.variables:
        expected = RANK + 1.0 if any(variable is one for one in local) else 1.0
        np.testing.assert_array_equal(variable, np.full(variable.shape, expected))


@pytest.mark.parametrize(
    ("module", "start", "expected"),
    [
        (horovod.keras, 0, [0.8, 0.4, 0.2, 0.1]),
        (horovod.tensorflow.keras, 2, [1, 1, 0.8, 0.4]),
        (hvd_keras, 2, [1, 1, 0.4, 0.4]),
    ],
)
def test_a_number_as_multiplier_decays_as_in_horovods_code(module, start, expected) -> None:
    """Its docstring says that the number holds, as it does in hvd_keras."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    schedule = module.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=start)
    x = np.full((4, 1), RANK, "float32")
    history = model.fit(x, x, epochs=4, verbose=0, callbacks=[schedule]).history
    np.testing.assert_allclose(history["lr"], expected, rtol=1e-6)


def test_commits_count_batches_of_steps_that_run_at_once() -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=4)
    commits: list[int] = []
    state = SimpleNamespace(commit=lambda: commits.append(callback._batches))
    callback = horovod.tensorflow.elastic.CommitStateCallback(state, batches_per_commit=6)
    x = np.full((12, 1), RANK, "float32")
    with hvd_keras.local_fit():
        model.fit(x, x, batch_size=1, verbose=0, callbacks=[callback])
    assert commits == [8, 12, 12]


def test_states_have_any_attributes_and_derived_classes() -> None:
    class Own(horovod.common.elastic.State):
        def __init__(self) -> None:
            super().__init__(hvd.broadcast_object, hvd.rank)
            self.epoch = 0

        def save(self) -> None:
            self.saved = self.epoch

    Own().commit()
    attributes = dict.fromkeys(("values", "assign", "broadcast", "resume"), RANK)
    state = hvd.elastic.TensorFlowState([tf.Variable(RANK)], **attributes)
    state.sync()
    state.restore()
    assert [getattr(state, name) for name in attributes] == [0] * 4
    assert int(state.variables[0]) == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_a_commit_has_the_accumulated_gradients_of_all_ranks(compiled: bool) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer = hvd_keras.DistributedOptimizer(optimizer)
    optimizer.apply([tf.constant([[RANK + 1.0]])], model.trainable_variables)
    if compiled:
        model.compile(optimizer)
    given = None if compiled else optimizer
    horovod.tensorflow.elastic.TensorFlowKerasState(model, given).commit()
    np.testing.assert_allclose(optimizer._accumulated_gradients[0], [[(SIZE + 1) / 2]])


@pytest.mark.skipif(SIZE == 1, reason="the set of rank 0 is that of all ranks")
def test_process_sets_are_numbered_and_written_as_horovods() -> None:
    everyone = f"ProcessSet(process_set_id=0, ranks={list(range(SIZE))}, mpi_comm=None)"
    assert str(hvd.global_process_set) == everyone
    wanted = hvd.ProcessSet([0])
    assert (wanted.size(), wanted.rank(), wanted.process_set_id) == (None, None, None)
    assert wanted.included() == (RANK == 0)
    assert hvd.add_process_set(wanted) is wanted
    others = hvd.add_process_set(range(1, SIZE))
    assert isinstance(others, hvd.ProcessSet)
    first = wanted.process_set_id
    assert str(wanted) == f"ProcessSet(process_set_id={first}, ranks=[0], mpi_comm=None)"
    assert hvd.remove_process_set(wanted)
    assert (wanted.process_set_id, wanted.size()) == (None, None)
    again = hvd.add_process_set([0])
    assert again.process_set_id == first  # of a set that was removed
    with pytest.raises(ValueError, match="was not added"):
        hvd.allreduce(1, op=hvd.Sum, process_set=wanted)
    for process_set in (again, others):
        assert copy.deepcopy(process_set) is process_set
        number = process_set.process_set_id
        assert int(hvd.size_op(number)) == process_set.size() == len(process_set.ranks)
        assert bool(hvd.process_set_included_op(number)) == process_set.included()
        if process_set.included():
            assert int(hvd.allreduce(RANK, op=hvd.Sum, process_set=process_set)) == sum(
                process_set.ranks
            )
        assert hvd.remove_process_set(process_set)
    assert not hvd.remove_process_set(others)
    for wrong in (["0"], [0.5], 7):
        with pytest.raises(ValueError, match="expected ranks"):
            hvd.ProcessSet(wrong)


@pytest.mark.parametrize("module", [hvd, hvd_keras])
@pytest.mark.skipif(SIZE == 1, reason="the set of rank 0 is that of all ranks")
def test_each_rank_gives_the_communicator_that_it_is_in(module) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(RANK % 2, RANK)
    process_set = module.add_process_set(comm)
    assert process_set.mpi_comm is comm
    assert process_set.ranks == list(range(RANK % 2, SIZE, 2))
    total = module.allreduce(RANK, op=module.Sum, process_set=process_set)
    assert int(total) == sum(process_set.ranks)
    with pytest.raises(ValueError, match="has the same ranks"):
        module.add_process_set(comm)
    assert module.remove_process_set(process_set)
    with pytest.raises(ValueError, match="different process sets"):
        module.add_process_set([RANK])
    with pytest.raises(ValueError, match="COMM_NULL"):
        module.ProcessSet(MPI.COMM_NULL)


def test_modules_have_every_name_of_the_table() -> None:
    import importlib

    from hvd_keras.horovod import names

    for module in names.MODULES:
        loaded = importlib.import_module(module)
        assert {*names.MODULES[module], *loaded.__all__} <= {*dir(loaded)}, module
        for name in names.MODULES[module]:
            assert getattr(loaded, name) is not None, f"{module}.{name}"
    for module, why in names.ABSENT.items():
        with pytest.raises(ImportError, match=re.escape(f"{module} is not available: {why}")):
            importlib.import_module(module)
    assert [int(part) for part in horovod.__version__.split(".")] > [0, 27]
    assert horovod.tensorflow.mpi_ops.Sum is hvd_keras.Sum
    # Of a package, of a module, and of a module that exists but is no part of this one.
    for module, name in ((hvd, "nothing"), (hvd.mpi_ops, "nothing"), (horovod, "torch")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(module, name)
    assert not [name for name in hvd.__all__ if name.startswith("_")]


def test_what_programs_reach_for() -> None:
    basics = hvd.mpi_ops._basics
    everyone = {0: list(range(SIZE))}
    assert (basics.rank(), basics.size(), basics.Sum) == (RANK, SIZE, hvd.Sum)
    assert basics._get_process_set_ids_and_ranks() == everyone
    assert float(hvd._allreduce(tf.constant(RANK + 1.0))) == SIZE * (SIZE + 1) / 2
    assert hvd.util._executing_eagerly()
    env = horovod.runner.common.util.env
    assert env.get_env_rank_and_size() == (RANK, SIZE)
    util = horovod.common.util
    assert util.mpi_built(verbose=True)
    assert not util.is_version_greater_equal_than("2.9.1", "2.10.0")
    assert hvd.refs_to_vars(hvd.vars_to_refs([one := tf.Variable(1)]))[0] is one


def test_a_rank_that_an_optimizer_leaves_out_fits_alone() -> None:
    some = hvd.add_process_set([0])
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer = horovod.tensorflow.keras.DistributedOptimizer(optimizer, process_set=some)
    model.compile(optimizer, "mse")
    of_keras = horovod.tensorflow.keras.callbacks
    callbacks = [of_keras.BroadcastGlobalVariablesCallback(0), of_keras.MetricAverageCallback()]
    x = np.full((4, 1), 1.0 + RANK, "float32")
    history = model.fit(x, 0 * x, batch_size=4, verbose=0, callbacks=callbacks).history
    np.testing.assert_allclose(history["loss"], [(1 + RANK) ** 2], rtol=1e-6)
    hvd.remove_process_set(some)
