"""The metrics over all ranks are those that one process logs for all ranks' samples."""

import warnings

import keras
import numpy as np
import pytest

import hvd_keras as hvd
from hvd_keras.runtime import agree
from hvd_keras.training import metric_states
from tests.harness import training

RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 4
CLASSES = 3


def data(rank: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes features, one-hot classes and sample weights; their distribution differs by rank."""
    random = np.random.default_rng([seed, rank])
    x = random.normal(loc=0.5 * rank, size=(rows, 5)).astype("float32")
    score = x[:, :CLASSES] + random.normal(scale=1 + rank, size=(rows, CLASSES))
    y = keras.utils.to_categorical(score.argmax(axis=1), CLASSES)
    return x, y, (random.uniform(0.5, 1.5, rows) * (1 + 2 * rank)).astype("float32")


def training_data(rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All ranks have equally many batches; the last ones differ in size."""
    return data(rank, 4 * BATCH + 1 + rank % (BATCH - 1), seed=1)


def validation_data(rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The number of batches differs by rank."""
    return data(rank, 9 + 13 * rank, seed=2)


def of_all_ranks(part) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate(arrays) for arrays in zip(*map(part, range(SIZE)), strict=True))


def binary(part):
    """Makes binary labels: whether the sample is of the first class."""
    return lambda rank: (part(rank)[0], part(rank)[1][:, :1], part(rank)[2])


class Overshoot(keras.metrics.Mean):
    """A user's metric, derived from Mean: the mean excess of the predictions."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(keras.ops.relu(y_pred - y_true), sample_weight)


class Total(keras.metrics.Sum):
    """Derived from Sum. Its result is a variable, which Keras allows."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_pred)

    def result(self):
        return self.total


class Highest(keras.metrics.Metric):
    """A user's metric whose state is not a sum."""

    def __init__(self, name="highest") -> None:
        super().__init__(name=name)
        self.highest = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.highest.assign(keras.ops.maximum(self.highest, keras.ops.max(y_pred)))

    def result(self):
        return self.highest


# As in Keras's guide: what it returns changes later.
Named = type("Named", (Highest,), {"result": lambda self: {"highest": self.highest.value}})


class Extremes(Highest):
    """A metric with two results."""

    def result(self):
        return keras.ops.multiply(self.highest, [1.0, -2.0])


class WithPrior(keras.metrics.Mean):
    """Derived from Mean, with an additional variable."""

    def __init__(self, name="with_prior") -> None:
        super().__init__(name=name)
        self.prior = self.add_variable((), "ones")

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_pred)

    def result(self):
        return super().result() + self.prior


def binary_metrics() -> list:
    return [
        "accuracy",
        keras.metrics.AUC(name="auc"),
        keras.metrics.AUC(curve="PR", num_thresholds=50, name="auc_pr"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Precision(thresholds=[0.3, 0.5], name="precisions"),
        keras.metrics.Recall(name="recall", thresholds=0.4),
        keras.metrics.SensitivityAtSpecificity(0.6, name="sensitivity"),
        keras.metrics.SpecificityAtSensitivity(0.6, name="specificity"),
        keras.metrics.PrecisionAtRecall(0.6, name="precision_at"),
        keras.metrics.RecallAtPrecision(0.7, name="recall_at"),
        keras.metrics.FalsePositives(name="false_positives"),
        keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.F1Score(threshold=0.5, name="f1_of_one_class"),
        Overshoot(name="overshoot"),
    ]


def make_model(outputs: int = 1, distributed: bool = True, rate: float = 0.0, **arguments):
    """The same weights everywhere; at a rate of 0 the metrics do not depend on the steps."""
    activation = "sigmoid" if outputs == 1 else "softmax"
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(outputs, activation)])
    training.set_weights(model, seed=3)
    optimizer = keras.optimizers.SGD(rate)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    arguments.setdefault("loss", "mse" if outputs == 1 else "categorical_crossentropy")
    model.compile(optimizer=optimizer, **arguments)
    return model


def fit(model: keras.Model, train, validation=None, callbacks=(), **arguments) -> dict:
    history = model.fit(
        *train[:2],
        sample_weight=train[2] if len(train) > 2 else None,
        validation_data=validation,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **arguments,
    )
    return history.history


def averaged(*behind) -> list:
    return [hvd.callbacks.MetricAverageCallback(), *behind]


def plain(values):
    return {key: np.asarray(value).tolist() for key, value in values.items()}


def assert_equal(logs: dict, expected: dict, tolerance: float = 1e-6) -> None:
    assert set(logs) == set(expected)
    for key, value in expected.items():
        assert np.shape(logs[key]) == np.shape(value), key
        np.testing.assert_allclose(logs[key], value, tolerance, tolerance, err_msg=key)


def assert_not_means_of(local: dict, expected: dict) -> None:
    """Checks that the test can fail: for each metric the mean over the ranks is different."""
    everyone = agree.gather_json("local", plain(local))
    differs: dict[str, bool] = {}
    for key, value in expected.items():
        mean = np.mean([theirs[key] for theirs in everyone], axis=0)
        name = key.removeprefix("val_")
        differs[name] = differs.get(name, False) or np.abs(mean - value).max() > 1e-4
    assert all(differs.values()), differs


@pytest.mark.cases(1)
@pytest.mark.parametrize("metric", [Highest, Extremes, Named, WithPrior])
def test_states_that_are_no_sums_are_averaged_with_one_warning(metric) -> None:
    train, val = binary(training_data), binary(validation_data)
    name = metric().name
    expected = fit(
        make_model(distributed=False, metrics=["mse"]),
        of_all_ranks(train)[:2],
        of_all_ranks(val)[:2],
    )
    local = fit(make_model(distributed=False, metrics=[metric()]), train(RANK)[:2], val(RANK)[:2])
    model = make_model(metrics=[metric(), "mse"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = fit(model, train(RANK)[:2], val(RANK)[:2], averaged(), epochs=3)
    told = [str(w.message) for w in caught if "MetricAverageCallback" in str(w.message)]
    assert len(told) == (RANK == 0)
    assert all(f"for {name} the unweighted mean" in text for text in told)
    assert all(metric.__name__ in text for text in told)
    assert all("derive the class from keras.metrics.Sum or Mean" in text for text in told)
    for key in (name, f"val_{name}"):
        mean = np.mean(agree.gather_json("fallback", plain(local)[key]), axis=0)
        np.testing.assert_allclose(logs.pop(key), [mean[0]] * 3, rtol=1e-6)
    assert_equal({key: values[:1] for key, values in logs.items()}, expected)


def state(model: keras.Model) -> dict:
    variables = [variable for metric in model.metrics for variable in metric.variables]
    return {str(i): variable.numpy() for i, variable in enumerate(variables)}


def test_this_ranks_state_and_evaluate_stay_its_own() -> None:
    train, val = binary(training_data), binary(validation_data)
    chosen = ["accuracy", "mae"]
    states = {}
    remember = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: states.update(state(model))
    )
    local = make_model(distributed=False, metrics=chosen)
    expected = local.evaluate(*val(RANK)[:2], BATCH, verbose=0, return_dict=True)
    model = make_model(metrics=chosen)
    fit(model, train(RANK)[:2], val(RANK)[:2], averaged(remember))
    assert_equal(states, state(local))
    if RANK == 0:  # on this rank alone: a collective would hang
        results = model.evaluate(*val(RANK)[:2], BATCH, verbose=0, return_dict=True)
        assert_equal(results, expected)
    assert "_get_metrics_result_or_logs" not in vars(model)
    hvd.allreduce([1.0])


def test_evaluate_with_the_callback_returns_all_ranks_metrics() -> None:
    val = binary(validation_data)
    # The states are those of a graph, which takes long to trace with so many metrics.
    alone, model = (
        make_model(distributed=made, metrics=binary_metrics(), run_eagerly=True)
        for made in (False, True)
    )
    expected = alone.evaluate(*of_all_ranks(val)[:2], BATCH, verbose=0, return_dict=True)
    local = alone.evaluate(*val(RANK)[:2], BATCH, verbose=0, return_dict=True)
    assert_not_means_of(local, expected)
    seen: list[dict] = []
    behind = keras.callbacks.LambdaCallback(on_test_end=seen.append)
    callback = averaged(behind)
    results = model.evaluate(*val(RANK)[:2], BATCH, 0, callbacks=callback, return_dict=True)
    assert_equal(results, expected)
    assert_equal(seen[0], expected)
    as_list = model.evaluate(*val(RANK)[:2], BATCH, 0, callbacks=callback)
    assert as_list[0] == pytest.approx(expected["loss"])
    assert_equal(state(model), state(alone))
    if RANK == 0:  # and the callback leaves nothing behind
        assert_equal(model.evaluate(*val(RANK)[:2], BATCH, verbose=0, return_dict=True), local)
    hvd.allreduce([1.0])


def test_evaluate_in_an_epoch_leaves_its_metrics_alone() -> None:
    train, val = binary(training_data), binary(validation_data)
    model, average = make_model(metrics=["accuracy"]), averaged()
    evaluate = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: model.evaluate(*train(RANK)[:2], verbose=0, callbacks=average)
    )
    logs = fit(model, train(RANK)[:2], val(RANK)[:2], [*average, evaluate])
    alone = make_model(distributed=False, metrics=["accuracy"])
    assert_equal(logs, fit(alone, of_all_ranks(train)[:2], of_all_ranks(val)[:2]))


def test_evaluate_between_batches_changes_metrics_as_on_one_process() -> None:
    """It resets them, and the batches behind it are added to its rows."""
    train, val = binary(training_data), binary(validation_data)
    model, average = make_model(metrics=["accuracy"]), averaged()
    evaluate = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            batch or model.evaluate(*val(RANK)[:2], verbose=0, callbacks=average)
        )
    )
    logs = fit(model, train(RANK)[:2], None, [*average, evaluate])
    behind = zip(
        of_all_ranks(val), of_all_ranks(lambda r: [a[BATCH:] for a in train(r)]), strict=True
    )
    seen = [np.concatenate(parts) for parts in behind]
    assert_equal(logs, fit(make_model(distributed=False, metrics=["accuracy"]), seen[:2]))


def test_callbacks_that_decide_and_a_second_average_leave_metrics_exact() -> None:
    train, val = binary(training_data), binary(validation_data)
    stop = keras.callbacks.EarlyStopping("accuracy", patience=9)
    rate = keras.callbacks.ReduceLROnPlateau("accuracy", patience=9)
    alone, model = (make_model(distributed=made, metrics=["accuracy"]) for made in (False, True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = fit(
            model, train(RANK)[:2], val(RANK)[:2], [stop, *averaged(), rate, *averaged()], epochs=2
        )
    del logs["learning_rate"]
    assert_equal(logs, fit(alone, of_all_ranks(train)[:2], of_all_ranks(val)[:2], epochs=2))
    assert not [w for w in caught if "MetricAverageCallback" in str(w.message)]


def test_evaluate_that_breaks_off_leaves_later_ones_alone() -> None:
    class BreakOff(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    val = binary(validation_data)(RANK)[:2]
    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        model.evaluate(*val, BATCH, verbose=0, callbacks=averaged(BreakOff()))
    expected = make_model(distributed=False).evaluate(*val, BATCH, verbose=0)
    if RANK == 0:
        assert model.evaluate(*val, BATCH, verbose=0) == pytest.approx(expected)
    hvd.allreduce([1.0])


@pytest.mark.parametrize("ahead", ["evaluates", pytest.param("changes", marks=pytest.mark.slow)])
def test_logs_that_are_not_of_the_metrics_are_averaged_with_a_warning(ahead: str) -> None:
    class Ahead(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if ahead == "evaluates":
                self.model.evaluate(np.ones((3, 5)), np.ones((3, 1)), verbose=0)
            else:
                logs["loss"] = 10.0 * RANK

    train = binary(training_data)(RANK)[:2]
    local = fit(make_model(distributed=False, metrics=["mae"]), train, None, [Ahead()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = fit(make_model(metrics=["mae"]), train, None, [Ahead(), *averaged()])
    everyone = agree.gather_json("local", local)
    assert_equal(logs, {key: np.mean([t[key] for t in everyone], axis=0) for key in local})
    told = [str(w.message) for w in caught if "or your train_step" in str(w.message)]
    assert len(told) == (1 if RANK == 0 else 0)
    assert all("for loss, mae the unweighted mean" in text for text in told)


def test_numbers_of_a_train_step_that_are_no_metrics_are_averaged() -> None:
    class Own(keras.Model):
        def train_step(self, data):
            self.seen.update_state(keras.ops.mean(data[0], axis=1))
            return {"seen": self.seen.result(), "rank": 4.0 * RANK}

    inputs = keras.Input((5,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.seen = keras.metrics.Mean(name="seen")
    model.compile(optimizer="sgd")
    add = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(none=None))
    logs = fit(model, training_data(RANK)[:2], None, [add, *averaged()])
    assert logs.pop("none") == [None]
    mean = of_all_ranks(training_data)[0].mean()
    assert_equal(logs, {"seen": [mean], "rank": [4.0 * np.mean(range(SIZE))]})
    assert_not_means_of({"seen": [training_data(RANK)[0].mean()]}, {"seen": [mean]})


def test_metrics_that_a_train_step_logs_under_other_names_are_exact() -> None:
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            y_pred = self(x)
            self.area.update_state(y, y_pred)
            self.error.update_state(keras.losses.mean_squared_error(y, y_pred))
            return {"roc": self.area.result(), "mse": self.error.result()}

        def test_step(self, data):
            return self.train_step(data)

    def logs_of(train, val, callbacks=()):
        inputs = keras.Input((5,))
        model = Own(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
        training.set_weights(model, seed=3)
        model.area = keras.metrics.AUC(name="auc")
        model.error = keras.metrics.Mean(name="error")
        model.compile(optimizer="sgd")
        return fit(model, train[:2], val[:2], callbacks)

    train, val = binary(training_data), binary(validation_data)
    expected = logs_of(of_all_ranks(train), of_all_ranks(val))
    assert_equal(logs_of(train(RANK), val(RANK), averaged()), expected)
    assert_not_means_of(logs_of(train(RANK), val(RANK)), expected)


def test_result_that_is_a_variable() -> None:
    """Keras would log the variable's value after the validation as the training's."""
    train, val = binary(training_data), binary(validation_data)
    model = make_model(metrics=[Total(name="total"), "mse"])
    logs = fit(model, train(RANK)[:2], val(RANK)[:2], averaged())
    for key, part in ("total", train), ("val_total", val):
        expected = model.predict(of_all_ranks(part)[0], verbose=0).sum()
        assert logs[key] == pytest.approx([expected], rel=1e-5)
    expected = make_model(distributed=False).evaluate(*of_all_ranks(train)[:2], verbose=0)
    assert logs["mse"] == pytest.approx([expected], rel=1e-6)


def test_names_that_occur_twice() -> None:
    train, val = binary(training_data), binary(validation_data)

    def chosen() -> list:
        return [keras.metrics.AUC(name="same"), keras.metrics.MeanSquaredError(name="same")]

    alone = make_model(distributed=False, metrics=chosen())
    expected = fit(alone, of_all_ranks(train)[:2], of_all_ranks(val)[:2])
    logs = fit(make_model(metrics=chosen()), train(RANK)[:2], val(RANK)[:2], averaged())
    assert {"same", "same_1", "val_same_1"} < set(logs)
    assert_equal(logs, expected)


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (lambda: ["mse", "mae"][RANK % 2], r"rank 0: \['loss', 'mse'\]; rank 1: \['loss', 'mae'\]"),
        (
            lambda: keras.metrics.AUC(num_thresholds=10 + RANK, name="auc"),
            r"rank 0: .*auc: AUC\(float32\[10\].*rank 1: .*auc: AUC\(float32\[11\]",
        ),
        (
            lambda: [Highest, Overshoot][RANK % 2]("same"),
            r"rank 0: .*same: Highest\(.*rank 1: .*same: Overshoot\(",
        ),
    ],
)
def test_metrics_that_differ_are_refused_on_all_ranks(mine, text: str) -> None:
    train, val = binary(training_data)(RANK)[:2], binary(validation_data)(RANK)[:2]
    model = make_model(metrics=[mine()])
    with pytest.raises(ValueError, match=text):
        fit(model, train, None, averaged())
    with pytest.raises(ValueError, match="the ranks log different metrics"):
        model.evaluate(*val, verbose=0, callbacks=averaged())
    if RANK == 0:
        model.evaluate(*val, verbose=0)
    hvd.allreduce([1.0])
    with pytest.raises(ValueError, match=r"rank 0: \['loss', 'val_loss'\]; rank 1: \['loss'\]"):
        fit(make_model(), train, val if RANK == 0 else None, averaged())


def test_every_metric_of_keras_is_a_sum() -> None:
    """Fails if a new Keras adds a metric or renames the variables of one."""
    one_class = {"num_classes": 2, "target_class_ids": [0]}
    arguments = {
        "PrecisionAtRecall": {"recall": 0.5},
        "RecallAtPrecision": {"precision": 0.5},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
        "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
        **{"IoU": one_class, "OneHotIoU": one_class},
        **{"MeanIoU": {"num_classes": 2}, "OneHotMeanIoU": {"num_classes": 2}},
    }
    classes = {
        name: kind
        for name, kind in vars(keras.metrics).items()
        if isinstance(kind, type) and issubclass(kind, keras.Metric) and kind is not keras.Metric
    }
    assert len(classes) > 40
    for name, kind in classes.items():
        metric = kind(**arguments.get(name, {}))
        ones = np.ones((2, 2), "float32")
        targets = np.ones(2) if name.startswith("Sparse") else ones
        metric.update_state(*([ones] if name in ("Mean", "Sum") else [targets, ones]))
        assert metric_states.is_summable(metric), name
    assert not metric_states.is_summable(Highest())
    assert not metric_states.is_summable(WithPrior())


class OfALoss(keras.metrics.Metric):
    """Adds up a loss, as perplexities do."""

    def __init__(self) -> None:
        super().__init__(name="of_a_loss")
        self.loss = keras.losses.MeanSquaredError(reduction="sum")
        self.total = self.add_weight(initializer="zeros")
        self.count = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None) -> None:
        self.total.assign_add(self.loss(y_true, y_pred, sample_weight))
        self.count.assign_add(keras.ops.cast(keras.ops.size(y_true), "float32"))

    def result(self):
        return self.total / self.count


class ByName(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        for metric in self.metrics[1:]:  # without the loss, as in Keras's guide
            metric.update_state(y, y_pred, sample_weight=sample_weight)
        return self.get_metrics_result()


def test_a_loss_that_a_metric_computes_is_not_weighed() -> None:
    model = ByName([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    training.compiled(model, keras.optimizers.SGD(0.0), metrics=[OfALoss()])
    x = np.random.default_rng(RANK).normal(size=(8, 3))
    logs = model.fit(x, x[:, :1], batch_size=4, verbose=0).history
    expected = np.mean(np.square(x.sum(1) - x[:, 0]))
    np.testing.assert_allclose(logs["of_a_loss"], [expected], rtol=1e-5)
