"""The central guarantee: N ranks with batch B train as one process with batch N * B."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import training
from tests.programs import draw
from tests.programs.own import Own

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(2, 3)
optimizers = keras.optimizers

MAIN = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
}
# Every optimizer of the installed Keras, so that new ones are included automatically.
NOT_BY_THEMSELVES = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}
EVERY = sorted(
    name
    for name, value in vars(optimizers).items()
    if isinstance(value, type)
    and issubclass(value, optimizers.Optimizer)
    and name not in NOT_BY_THEMSELVES
)
OPTIONS = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.2},
    "clipvalue": {"clipvalue": 0.05},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4},
    "weight_decay": {"weight_decay": 0.05},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 3},
    "loss_scale_factor": {"loss_scale_factor": 128.0},
}
RATES = {"Adadelta": 1.0, "Lion": 0.001, "SGD": 0.1, "Ftrl": 0.05, "Adagrad": 0.1}


SPECIAL = {
    "schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "multi": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.01), {".*bias": optimizers.SGD(0.1)})
    ),
    "a user's own": lambda: Own(0.1),
}


def test_random_programs_have_every_optimizer_and_option() -> None:
    assert {*EVERY} <= {*draw.OPTIMIZERS.split()}
    renamed = {"plain", "use_ema", "gradient_accumulation_steps"}
    assert {*OPTIONS} - renamed <= {*draw.CHOICES["option"].split()}


def test_sparse_as_dense_is_alike_on_one_rank() -> None:
    """One rank makes dense updates, too."""
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    alone, together = training.sparse_model(), training.sparse_model()
    x, y = training.data(alone, SIZE)
    for model, all_ranks in ((alone, False), (together, True)):
        training.set_weights(model, seed=0)
        of = hvd.global_process_set if all_ranks else sets[RANK]
        adam = hvd.DistributedOptimizer(MAIN["adam"](), sparse_as_dense=True, process_set=of)
        model.compile(adam, "mse", run_eagerly=True)
        rows = [training.shard(a, RANK, SIZE) if all_ranks else a for a in (x, y)]
        batch = training.BATCH * (1 if all_ranks else SIZE)
        model.fit(*rows, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    training.assert_close(together, alone)


def test_gradient_accumulation_communicates_in_updates_only() -> None:
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0, gradient_accumulation_steps=2))
    optimizer.build([variable])
    step = tf.function(lambda: optimizer.apply([tf.fill([2], RANK + 1.0)]))
    step()
    step()
    # Would hang if accumulating needed the other ranks: they accumulate at different times.
    if RANK == 0:
        step()
    hvd.allreduce(tf.ones(1))
    if RANK != 0:
        step()
    step()
    np.testing.assert_allclose(variable, np.full(2, -2 * (SIZE + 1) / 2), rtol=1e-6)


def test_variable_without_a_gradient_on_one_rank() -> None:
    """The other ranks' gradients are divided by the number of all ranks, also sparse ones."""
    variables = [
        keras.Variable(np.zeros((6, 2), "float32"), name=name)
        for name in ("dense", "sparse", "nobody", "all")
    ]
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0))

    @tf.function
    def step():
        row = tf.ones((1, 2))
        gradients = [
            tf.ones((6, 2)) * (RANK + 1),
            tf.IndexedSlices(row, [RANK], [6, 2]),
            None,
            tf.ones((6, 2)),
        ]
        if RANK == 0:
            gradients[0] = gradients[1] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says that "nobody" has no gradient
            optimizer.apply(gradients, variables)

    step()
    expected = -sum(r + 1 for r in range(1, SIZE)) / SIZE
    np.testing.assert_allclose(variables[0], np.full((6, 2), expected), rtol=1e-6)
    rows = np.zeros((6, 2))
    rows[1:SIZE] = -1 / SIZE
    np.testing.assert_allclose(variables[1], rows, rtol=1e-6)
    np.testing.assert_array_equal(variables[2], np.zeros((6, 2)))
    np.testing.assert_allclose(variables[3], -np.ones((6, 2)), rtol=1e-6)


def test_tape_keeps_the_structure_of_its_sources() -> None:
    a, b = tf.Variable(3.0), tf.Variable(2.0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = a * a * b * (RANK + 1)
    gradients = tape.gradient(loss, {"a": a, "rest": [b]})
    mean = {"a": 12 * (SIZE + 1) / 2, "b": 9 * (SIZE + 1) / 2}
    np.testing.assert_allclose(gradients["a"], mean["a"], rtol=1e-6)
    np.testing.assert_allclose(gradients["rest"][0], mean["b"], rtol=1e-6)


def test_wrong_optimizers() -> None:
    with pytest.raises(TypeError, match=r"got 0\.1, expected a keras.optimizers.Optimizer"):
        hvd.DistributedOptimizer(0.1)
    with pytest.raises(ValueError, match="adm"):
        hvd.DistributedOptimizer("adm")
    with pytest.raises(ValueError, match="Wrap an optimizer once"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizers.SGD()))
    with pytest.raises(ValueError, match=r"hvd\.Average, hvd\.Sum"):
        hvd.DistributedOptimizer(optimizers.SGD(), op=hvd.Max)
    with pytest.raises(TypeError, match=r"tf.GradientTape"):
        hvd.DistributedGradientTape(None)


def test_an_optimizer_may_be_named() -> None:
    optimizer = hvd.DistributedOptimizer("sgd")
    assert type(optimizer) is optimizers.SGD
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer.apply([tf.fill([3], RANK + 1.0)], [weight])
    np.testing.assert_allclose(weight, np.full(3, 1 - 0.01 * (SIZE + 1) / 2), rtol=1e-6)


def test_class_and_config_stay_the_users() -> None:
    optimizer = optimizers.AdamW(0.01, clipnorm=2.0)
    config = optimizer.get_config()
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert type(wrapped) is optimizers.AdamW
    assert wrapped.get_config() == config
