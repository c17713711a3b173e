"""The callbacks, in a real fit."""

import os
import pathlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2)
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to differ from")


def fit(model: keras.Model, callbacks: list, epochs: int = 1, **arguments) -> dict:
    return training.fit(model, *callbacks, broadcast=False, epochs=epochs, **arguments)


def train(model: keras.Model, callbacks: list, known: bool, **arguments) -> list[float]:
    """Fits a dataset of known or unknown length; returns the learning rate of each batch."""
    data = tf.data.Dataset.from_tensor_slices(training.mine(model)).batch(training.BATCH)
    if not known:
        data = data.filter(lambda x, y: True)
    seen: list[float] = []
    # With data of unknown length, Keras begins one batch more than there are.
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(rates(model))
    )
    model.fit(data, verbose=0, callbacks=[*callbacks, record], **arguments)
    return seen


class Record(keras.callbacks.Callback):
    """Records what another callback sees, batch by batch."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what = what
        self.seen: list = []

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self.seen.append(self.what(self.model))


def compiled(model: keras.Model, optimizer=None, **arguments) -> keras.Model:
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    return training.compiled(model, optimizer, **arguments)


@pytest.mark.parametrize("root", [pytest.param(0, marks=pytest.mark.slow), SIZE - 1])
def test_broadcast_comes_before_the_first_step_and_covers_the_optimizer(root: int) -> None:
    model = training.dense_model()
    training.set_weights(model, seed=RANK)
    expected = training.dense_model()
    training.set_weights(expected, seed=root)
    compiled(model, keras.optimizers.Adam(0.01 * (RANK + 1)))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(10 * (RANK + 1))

    def state(net):
        return training.flat(net), float(net.optimizer.learning_rate), int(net.optimizer.iterations)

    record = Record(state)
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(root), record])
    weights, rate, iterations = record.seen[0]
    np.testing.assert_array_equal(weights, training.flat(expected))
    assert rate == pytest.approx(0.01 * (root + 1))
    assert iterations == 10 * (root + 1)


def test_broadcast_root_out_of_range() -> None:
    model = compiled(training.dense_model())
    with pytest.raises(ValueError, match=f"root_rank is {SIZE}, expected"):
        fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(SIZE)])


@several
def test_a_callback_that_one_rank_alone_has_is_named_on_all(directory: pathlib.Path) -> None:
    class Derived(hvd.callbacks.MetricAverageCallback):
        """Waits as its base does."""

    own = hvd.callbacks
    broadcast = own.BroadcastGlobalVariablesCallback(0)
    others = own.VerifyWeights(2), own.Checkpoint(directory), own.ProgressLogger()
    for one in (broadcast, Derived(), *others):
        name = "MetricAverageCallback" if isinstance(one, Derived) else type(one).__name__
        with pytest.raises(ValueError, match=rf"rank 0: none; rank 1: {name}\. Pass each"):
            fit(compiled(training.dense_model()), [one] * (RANK == 1))
    average = Derived() if RANK == 1 else own.MetricAverageCallback()
    warmup = own.LearningRateWarmupCallback(0.1, warmup_steps=1)  # exchanges nothing
    fit(compiled(training.dense_model()), [broadcast, average, *[warmup] * (RANK == 0)])


@several
def test_broadcast_of_models_that_differ() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2 + RANK)])
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(Exception, match=r"(?s)rank 0.*\[3,2\].*rank 1.*\[3,3\]"):
        hvd.broadcast_variables(model.variables, 0)


def masks() -> np.ndarray:
    """Returns the dropout masks that a rank draws in its first batches."""
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dropout(0.5, seed=3)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    return model(np.ones((4, 50)), training=True).numpy()


def test_dropout_masks_differ_by_rank_and_repeat_in_a_rerun() -> None:
    first = masks()
    np.testing.assert_array_equal(first, masks())
    everyone = hvd.allgather(first[np.newaxis]).numpy()
    assert len({mask.tobytes() for mask in everyone}) == SIZE
    alone = keras.layers.Dropout(0.5, seed=3)
    np.testing.assert_array_equal(everyone[0], alone(np.ones((4, 50)), training=True))


def test_the_generator_of_keras_random_has_the_roots_seed() -> None:
    def drawn(seed: int) -> list[float]:
        keras.utils.set_random_seed(seed if RANK == 0 else seed + RANK * seed)
        masks()
        return agree.gather_json("drawn", float(keras.random.normal(())))

    first = drawn(10)
    assert len(set(first)) == SIZE
    assert drawn(11) != first
    keras.utils.set_random_seed(99 + RANK)
    assert drawn(10) == first


def test_metrics_are_averaged_for_the_callbacks_behind() -> None:
    class Log(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mine"] = 10.0 * RANK + epoch
            logs |= {"text": "not a number", "run": "20240101", "best": RANK == 0}

    seen = []
    read = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    model = compiled(training.dense_model())
    history = fit(model, [Log(), hvd.callbacks.MetricAverageCallback(), read], epochs=2)
    mean = np.mean([10.0 * r for r in range(SIZE)])
    assert [logs["mine"] for logs in seen] == [mean, mean + 1]
    assert history["mine"] == [mean, mean + 1]
    assert seen[0]["run"] == "20240101"
    assert seen[0]["best"] is (RANK == 0)
    losses = agree.gather_json("losses", history["loss"])
    assert all(loss == losses[0] for loss in losses)


def rates(model: keras.Model) -> float:
    return float(model.optimizer.learning_rate)


def ramp(steps: int, batches: range) -> list[float]:
    """Returns the rates of these batches, if warm-up to 0.3 takes ``steps``."""
    return [0.3 / SIZE * (1 + (SIZE - 1) * min(1.0, (i + 1) / steps)) for i in batches]


@pytest.mark.cases(1)
@pytest.mark.parametrize("accumulated", [None, 4])
@pytest.mark.parametrize("known", [True, False])
def test_warmup_over_steps_ends_within_an_epoch(known: bool, accumulated: int | None) -> None:
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9, gradient_accumulation_steps=accumulated)
    model = compiled(training.dense_model(), optimizer)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_steps=training.STEPS + 2)
    trained_at = train(model, [warmup], known, epochs=2)
    one = 0.3 / (training.STEPS + 2)  # Keras counts the batch that it tries in vain, too
    expected = ramp(training.STEPS + 2, range(2 * training.STEPS))
    np.testing.assert_allclose(trained_at, expected, rtol=1e-5, atol=0 if known else one)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "at_once"),
    [
        ({"warmup_epochs": 2}, 1),
        pytest.param({"warmup_epochs": 2}, 4, marks=SLOW),
        pytest.param({"warmup_steps": 7}, 4, marks=SLOW),
    ],
)
def test_warmup_rises_from_the_rate_of_one_rank_to_that_of_all(arguments, at_once) -> None:
    """With several steps at once, each has the rate of the last."""
    model = compiled(training.dense_model(), steps_per_execution=at_once)
    record = Record(rates)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.3, **arguments)
    history = fit(model, [warmup, record], epochs=3)
    length = arguments.get("warmup_steps", 2 * training.STEPS)
    begins = [e * training.STEPS + b for e in range(3) for b in range(0, training.STEPS, at_once)]
    expected = [ramp(length, range(b + at_once - 1, b + at_once))[0] for b in begins]
    np.testing.assert_allclose(record.seen, expected, rtol=1e-5)
    assert record.seen[-1] == pytest.approx(0.3)
    np.testing.assert_allclose(history["lr"][1:], [0.3, 0.3], rtol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("known", [True, False])
def test_warmup_continues_after_a_restart(directory: pathlib.Path, known: bool) -> None:
    """Continues by ``initial_epoch``, or with unknown length by the restored optimizer."""
    length = 2 * training.STEPS - 1
    model = compiled(training.dense_model())
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_steps=length)
    train(model, [warmup], known)
    if RANK == 0:
        model.save(directory / "model.keras")
    hvd.allreduce([1.0])
    restored = keras.models.load_model(directory / "model.keras")
    restored.compile(hvd.DistributedOptimizer(restored.optimizer), loss="mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_steps=length)
    trained_at = train(restored, [warmup], known, epochs=2, initial_epoch=1)
    one = 0.3 / length  # Keras counts the batch that it tries in vain, too
    expected = ramp(length, range(training.STEPS, 2 * training.STEPS))
    np.testing.assert_allclose(trained_at, expected, rtol=1e-5, atol=0 if known else one)


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_impossible_warmup_steps(steps) -> None:
    with pytest.raises(ValueError, match=f"warmup_steps is {steps}, expected a positive integer"):
        hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_steps=steps)


def test_a_missing_rate() -> None:
    for kind, more in (("Warmup", ()), ("Schedule", (0.1,))):
        with pytest.raises(ValueError, match=f"{kind}Callback: initial_lr is None, expected"):
            getattr(hvd.callbacks, f"LearningRate{kind}Callback")(None, *more)


def test_warmup_in_mixed_precision_corrects_the_momentum() -> None:
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    model = compiled(training.dense_model(), scaled)
    before, after = (Record(lambda net: optimizer.momentums[0].numpy()) for _ in range(2))
    halve = hvd.callbacks.LearningRateScheduleCallback(0.05, 0.5, start_epoch=1)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)  # builds the optimizer
    fit(model, [broadcast, before, halve, after], epochs=2)
    i = training.STEPS
    assert np.abs(before.seen[i]).max() > 0
    np.testing.assert_allclose(after.seen[i], before.seen[i] / 2, rtol=1e-5)


def test_schedule_in_a_range_of_epochs() -> None:
    record = Record(rates)
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.5, lambda epoch: 0.1**epoch, start_epoch=1, end_epoch=3
    )
    history = fit(compiled(training.dense_model()), [schedule, record], epochs=4)
    np.testing.assert_allclose(history["lr"], [0.1, 0.05, 0.005, 0.005], rtol=1e-5)
    np.testing.assert_allclose(record.seen[:: training.STEPS], history["lr"], rtol=1e-5)


def test_schedule_by_a_number_and_by_fractions_of_epochs() -> None:
    record = Record(rates)
    callbacks = [
        hvd.callbacks.LearningRateScheduleCallback(1.0, 0.25, end_epoch=1),
        hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: epoch, start_epoch=1, staircase=False
        ),
        record,
    ]
    fit(compiled(training.dense_model()), callbacks, epochs=2)
    n = training.STEPS
    np.testing.assert_allclose(record.seen, [0.25] * n + [1 + i / n for i in range(n)], rtol=1e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("optimizer", "corrected"), [(None, False), (None, True), ("Muon", True)])
def test_momentum_correction_scales_the_buffers_with_the_rate(optimizer, corrected: bool) -> None:
    """See Goyal et al., section 3: buffers hold old rates times gradients; those of Muon do not."""
    muon = [keras.optimizers.Muon(0.01)] if optimizer else []
    model = compiled(training.dense_model(), *muon)
    model.optimizer.build(model.trainable_variables)
    buffers = Record(lambda net: net.optimizer.momentums[0].numpy())
    halve = hvd.callbacks.LearningRateScheduleCallback(
        0.05, 1.0, start_epoch=1, momentum_correction=corrected
    )
    after = Record(lambda net: net.optimizer.momentums[0].numpy())
    fit(model, [buffers, halve, after], epochs=2)
    i = training.STEPS  # the first batch of the second epoch
    assert np.abs(buffers.seen[i]).max() > 0
    factor = 0.5 if corrected and not muon else 1.0
    np.testing.assert_allclose(after.seen[i], buffers.seen[i] * factor, rtol=1e-5)
    np.testing.assert_array_equal(after.seen[i + 1], buffers.seen[i + 1])


def test_a_rate_that_cannot_be_set_is_refused() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    for rate, what in ((schedule, "schedule"), (lambda: 0.1, "function")):
        model = compiled(training.dense_model(), keras.optimizers.SGD(rate))
        with pytest.raises(ValueError, match=f"is a {what}, which cannot be set"):
            fit(model, [hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0)])


def test_a_loop_with_a_list_of_callbacks_that_knows_no_length(directory, capsys) -> None:
    own, model, trained_at = hvd.callbacks, compiled(training.dense_model()), []
    training.set_weights(model, seed=RANK)
    warmup = own.LearningRateWarmupCallback(0.3, warmup_steps=training.STEPS)
    every = [own.BroadcastGlobalVariablesCallback(0), warmup, own.ProgressLogger()]
    loop = keras.callbacks.CallbackList(every, model=model)
    x, y = (part.reshape(training.STEPS, training.BATCH, -1) for part in training.mine(model))
    loop.on_train_begin()
    for epoch in range(2):
        loop.on_epoch_begin(epoch)
        for batch in range(training.STEPS):
            loop.on_train_batch_begin(batch)
            trained_at.append(rates(model))
            logs = model.train_on_batch(x[batch], y[batch], return_dict=True)
            loop.on_train_batch_end(batch, logs)
        loop.on_epoch_end(epoch, logs)
    loop.on_train_end()
    training.assert_bit_identical_on_all_ranks(model)
    expected = ramp(training.STEPS, range(2 * training.STEPS))
    np.testing.assert_allclose(trained_at, expected, rtol=1e-5)
    assert ("Epoch 2: 6/6" in capsys.readouterr().out) == (RANK == 0)

    def begin(one) -> None:
        loop = keras.callbacks.CallbackList([one], model=model)
        loop.on_train_begin()
        loop.on_train_batch_begin(0)

    unsuitable = (own.LearningRateWarmupCallback(0.3), "is unknown. Pass steps_per_epoch")
    for one, text in (unsuitable, (own.Checkpoint(directory), "works in fit only. In a loop of")):
        with pytest.raises(ValueError, match=text):
            begin(one)


def test_the_rate_of_optimizers_in_attributes_is_refused() -> None:
    model = compiled(training.dense_model())
    model.other = model.optimizer
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="are in attributes of the model"):
        fit(model, [hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0)])


@pytest.mark.cases(1)
@pytest.mark.parametrize("cls", [hvd.callbacks.ModelCheckpoint, keras.callbacks.ModelCheckpoint])
@pytest.mark.parametrize("save_freq", ["epoch", 2])
def test_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks(
    directory: pathlib.Path, cls, save_freq
) -> None:
    (directory / "file").write_text("in the way")
    checkpoint = cls(directory / "file" / "model.keras", save_freq=save_freq)
    with pytest.raises(OSError, match=r".*file"):
        fit(compiled(training.dense_model()), [checkpoint])


def test_saved_model_loads_and_trains_without_hvd_keras(directory: pathlib.Path) -> None:
    """Loads it in a process without hvd_keras, with the state of the optimizer."""
    model = compiled(training.sparse_model(), keras.optimizers.Adam(0.01))
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    if RANK == 0:
        model.save(directory / "model.keras")
        x, _ = training.data(model, SIZE)
        np.savez(directory / "expected.npz", x=x, y=model.predict(x, verbose=0))
        (directory / "load.py").write_text(
            "import sys\n"
            "sys.modules['hvd_keras'] = None\n"
            "import keras, numpy as np\n"
            "model = keras.models.load_model('model.keras')\n"
            "data = np.load('expected.npz')\n"
            "y = model.predict(data['x'], verbose=0)\n"
            "np.testing.assert_allclose(y, data['y'], rtol=1e-5)\n"
            "assert type(model.optimizer) is keras.optimizers.Adam\n"
            f"assert int(model.optimizer.iterations) == {training.STEPS}\n"
            "model.fit(data['x'], data['y'], verbose=0)\n"
            "print('went on')\n"
        )
        # Outside of the job: otherwise the child would be a second rank 0.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
        output = subprocess.run(
            [sys.executable, "load.py"],
            cwd=directory,
            env=clean,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert "went on" in output.stdout, output.stderr
    hvd.allreduce([1.0])


def test_all_ranks_export_to_one_path(directory: pathlib.Path) -> None:
    """All write at once; none reads a folder before all have written it."""
    model = compiled(training.dense_model())
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    training.set_weights(model, seed=3)
    x, _ = training.data(model, SIZE)
    expected = model(x).numpy()
    tree = tf.Module()
    tree.weights = [tf.Variable(w) for w in model.get_weights()]
    for _ in range(2):
        agree.gather_json("export", None)
        model.export(directory / "exported", verbose=False)
        tf.saved_model.save(tree, str(directory / "tree"))
        model.save(directory / "folder", zipped=False)
        model.save_weights(directory / "model.weights.json", max_shard_size=1.4e-7)
        agree.gather_json("export is read", None)
        loaded = tf.saved_model.load(directory / "exported")  # which must live as long as `serve`
        np.testing.assert_allclose(loaded.serve(x), expected, rtol=1e-5)
        for mine, theirs in zip(
            tree.weights, tf.saved_model.load(directory / "tree").weights, strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        again = training.dense_model()
        again.load_weights(directory / "model.weights.json")
        np.testing.assert_array_equal(again(x), expected)
        again = keras.models.load_model(directory / "folder")
        np.testing.assert_array_equal(again(x), expected)
    agree.gather_json("exported", None)
    assert hasattr(tf.saved_model.save, "__wrapped__"), "Keras has imported the module again"
    if RANK == 0:
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
        graph = (directory / "exported" / "saved_model.pb").read_bytes()
        assert b"Hvd" not in graph, "it needs hvd_keras"


@several
def test_later_models_begin_as_in_one_process() -> None:
    """Keras draws the seeds of initializers by Python's generator, which fit leaves alone."""
    keras.utils.clear_session()  # its own generator is not there yet
    random.seed(3)
    model = compiled(training.dense_model())
    before = random.getstate()
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert random.getstate() == before
