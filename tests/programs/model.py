"""The models of programs: layers, optimizers, losses."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs.data import CLASSES, LENGTH, SHAPES, SIDE, WORDS, Side, rows
from tests.programs.draw import View
from tests.programs.own import (
    FUNCTIONS,
    Clipping,
    Initial,
    Overshoot,
    Own,
    Positions,
    largest,
    register,
    spread,
)

RATES = {"SGD": 0.05, "Momentum": 0.02, "Adagrad": 0.05, "Adadelta": 0.5, "Ftrl": 0.05}
RATES |= {"Lion": 0.003}


LOGITS = {"from_logits": True}
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mse": (keras.losses.MeanSquaredError, {}),
    "huber": (keras.losses.Huber, {"delta": 0.5}),
    "log_cosh": (keras.losses.LogCosh, {}),
    "mae": (keras.losses.MeanAbsoluteError, {}),
    "sparse": (keras.losses.SparseCategoricalCrossentropy, LOGITS),
    "ignored": (keras.losses.SparseCategoricalCrossentropy, {**LOGITS, "ignore_class": 1}),
    "probabilities": (keras.losses.SparseCategoricalCrossentropy, {}),
    "categorical": (keras.losses.CategoricalCrossentropy, LOGITS),
    "binary": (keras.losses.BinaryCrossentropy, {}),
    "focal": (keras.losses.BinaryFocalCrossentropy, LOGITS),
    "dice": (keras.losses.Dice, {}),
}
ACTIVATIONS = {"probabilities": "softmax", "binary": "sigmoid", "dice": "sigmoid"}
# Of options of optimizers; those not here are true.
VALUES = {"weight_decay": 0.02, "clipnorm": 0.1, "global_clipnorm": 0.2, "clipvalue": 0.03}
VALUES |= {"loss_scale_factor": 128.0, "num_groups": 2, "gradient_predivide_factor": 2.0}


def _layers(
    spec: View, number: int, noise: float, divided: int | None = None, own: Sequence[int] = ()
) -> dict[str, Any]:
    """The layers of a model by name.

    Args:
        spec: of the program.
        number: decides about their weights.
        noise: by how much these change.
        divided: of the ranks that have the table in parts, the process set's number.
        own: the ranks whose own layers it has.
    """
    made: dict[str, Any] = {}

    def add(cls: Any, name: str, *args: Any, kernel: str = "kernel", **options: Any) -> None:
        if kernel:
            options.setdefault(f"{kernel}_initializer", Initial(number + len(made), noise))
        made[name] = cls(*args, name=name, **options)

    of = keras.layers
    decay: dict[str, Any] = {}
    if spec.regularizer == "kernel":
        decay["kernel_regularizer"] = keras.regularizers.L2(0.01)
    elif spec.regularizer != "none":
        of_sum = keras.regularizers.L2(0.02)
        decay["activity_regularizer"] = of_sum if spec.regularizer == "activity" else spread
    if spec.constraint:
        decay["kernel_constraint"] = keras.constraints.MaxNorm(0.9)
    if spec.normalization:
        made["normalization"] = of.Normalization()
        x = rows(spec, "train")[0]
        main = x if spec.inputs == "one" else x[0] if spec.inputs == "tuple" else x["main"]
        made["normalization"].build((None, *main.shape[1:]))
        if not number:  # rank 0 has the right state
            made["normalization"].adapt(main)
    if spec.has_table:
        cls, mask = of.Embedding, {"mask_zero": spec.is_sequence}
        if divided is not None:  # a part is not broadcast
            mask["embeddings_initializer"] = Initial(number % 100 + len(made), noise)
            of_id = importlib.import_module("hvd_keras.runtime.process_sets").of_id
            cls = importlib.import_module("hvd_keras").layers.Embedding
            mask |= {"shard": spec.table, "process_set": of_id(divided)}
        if spec.regularizer == "kernel":
            mask["embeddings_regularizer"] = keras.regularizers.L2(0.01)
        if spec.constraint:
            of_rows, of_all = keras.constraints.MaxNorm(0.9, 1), keras.constraints.NonNeg()
            mask["embeddings_constraint"] = of_all if spec.table == "columns" else of_rows
        combines = divided is not None and spec.table == "columns" and spec.body == "embedding"
        if combines:
            mask["combiner"] = "mean"
        add(cls, "table", WORDS, 3, kernel="embeddings", **mask)
        if spec.body == "positions":
            made["positions"] = Positions(number + 60, noise, name="positions")
        if not spec.is_sequence:
            add(of.Identity if combines else of.GlobalAveragePooling1D, "mean", kernel="")
    elif spec.body in ("conv1d", "conv2d"):
        cls = of.Conv1D if spec.body == "conv1d" else of.Conv2D
        add(cls, "convolution", 3, 2, activation="tanh", **decay)
        add(of.Flatten, "flatten", kernel="")
    elif spec.body in ("lstm", "gru"):
        recurrent = {"recurrent_initializer": Initial(number + 50, noise)}
        add(of.LSTM if spec.body == "lstm" else of.GRU, "recurrent", 3, **recurrent, **decay)
    else:
        norm = spec.body == "batchnorm"
        add(of.Dense, "dense", 4, activation=None if norm else "tanh", use_bias=not norm, **decay)
    if spec.body == "batchnorm":
        add(of.BatchNormalization, "norm", kernel="", synchronized=True)
    if spec.body == "layernorm":
        add(of.LayerNormalization, "norm", kernel="")
    if spec.inputs != "one" and not spec.local:
        add(of.Dense, "beside", 2, activation="tanh")
    units = CLASSES if spec.has_classes or spec.loss == "categorical" else 1
    for name in ("a",) if spec.outputs == "one" else ("a", "b"):
        activation = ACTIVATIONS.get(spec.loss)
        add(of.Dense, name, units, activation=activation, dtype="float32")
    for rank in own:
        name = f"own{rank}"
        made[name] = of.Dense(2, name=name, kernel_initializer=Initial(900 + rank))
        made[name].owner = rank
        made[name].build((None, SIDE))  # the optimizer must know its variables
    return made


def _wire(spec: View, layers: dict[str, Any], x: Any) -> Any:
    """The outputs of the layers."""
    side = None
    if spec.inputs != "one":
        x, side = x if spec.inputs == "tuple" else (x["main"], x["side"])
    inner = [
        layer
        for name, layer in layers.items()
        if name not in ("beside", "a", "b") and "own" not in name
    ]
    if spec.style == "nested":
        inner = [keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype), *inner], name="inner")]
    for layer in inner:
        x = layer(x)
    if spec.local:
        own = [layer for name, layer in layers.items() if "own" in name]
        x = keras.ops.concatenate(
            [x, sum(one(side[:, :SIDE]) * side[:, SIDE + one.owner, None] for one in own)], axis=-1
        )
    elif side is not None:
        x = keras.ops.concatenate([x, layers["beside"](side)], axis=-1)
    outputs = {name: layers[name](x) for name in ("a", "b") if name in layers}
    if spec.outputs == "dict":
        return outputs
    return list(outputs.values()) if spec.outputs == "list" else outputs["a"]


@register
class Net(keras.Model):
    """A subclassed model."""

    def __init__(self, spec: dict[str, Any], number: int, **more: Any) -> None:
        names = "noise", "divided", "own"
        options = {name: more.pop(name) for name in names if name in more}
        super().__init__(**more)
        self.arguments = {"spec": spec, "number": number, **options}
        self.view = View(spec)
        self.parts = list(_layers(self.view, number, **options).values())

    def call(self, x: Any) -> Any:
        return _wire(self.view, {layer.name: layer for layer in self.parts}, x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}


class Adding:
    """Adds to the losses of ``compile``."""

    def compute_loss(self: Any, x: Any, y: Any, y_pred: Any, *more: Any, **others: Any) -> Any:
        added = [tf.reduce_mean(tf.cast(one, "float32") ** 2) for one in tf.nest.flatten(y_pred)]
        return super().compute_loss(x, y, y_pred, *more, **others) + 0.3 * sum(added)


class Stepping:
    """Trains by a step of its own."""

    tape: Callable[[Any], Any] = staticmethod(lambda tape: tape)  # changes a tape
    second: Any = None  # the optimizer of the last layer
    divides = False  # compile's losses of rows

    def by_optimizer(self: Any) -> tuple[Any, Any]:
        """The variables of the first optimizer, and of the second, which has the last layer."""
        parts = getattr(self, "parts", self.layers)
        shared = [part for part in parts if "own" not in part.name]
        last = [] if self.second is None else shared[-1].trainable_variables
        return [v for v in self.trainable_variables if all(v is not one for one in last)], last

    def train_step(self: Any, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted, weights, training=True)
            loss = tf.reduce_mean(loss) if self.divides else loss
            scaled = self.optimizer.scale_loss(loss)
        tape = self.tape(tape)
        rest, last = self.by_optimizer()
        self.optimizer.apply(tape.gradient(scaled, rest), rest)
        if last:
            self.second.apply(tape.gradient(loss, last), last)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        return self.compute_metrics(x, y, predicted, weights)


@register
class AddingModel(Adding, keras.Model):
    """A functional model."""


@register
class AddingSequential(Adding, keras.Sequential):
    """A sequential model."""


@register
class AddingNet(Adding, Net):
    """A subclassed model."""


@register
class SteppingModel(Stepping, keras.Model):
    """A functional model."""


@register
class SteppingSequential(Stepping, keras.Sequential):
    """A sequential model."""


@register
class SteppingNet(Stepping, Net):
    """A subclassed model."""


def build(spec: View, number: int, noise: float, side: Side) -> Any:
    """A new model; ``number`` decides about its weights, which ``noise`` changes."""
    kinds = {"keras": (keras.Model, keras.Sequential, Net)}
    kinds["adds"] = kinds["function"] = (AddingModel, AddingSequential, AddingNet)
    functional, sequential, subclassed = kinds.get(
        spec.step, (SteppingModel, SteppingSequential, SteppingNet)
    )
    divided = side.process_set.id() if spec.is_divided and side.hvd else None
    if spec.style == "subclassed":
        own = [*range(spec.local)] if side.rank is None else [side.rank] * bool(spec.local)
        return subclassed(spec.spec, number, noise=noise, divided=divided, own=own, name="net")
    layers = _layers(spec, number, noise, divided)
    integers = "int32" if spec.has_table else None
    shape = (LENGTH,) if spec.has_table else SHAPES.get(spec.body, (5,))
    if spec.style in ("sequential", "unbuilt"):
        first = [keras.Input(shape, dtype=integers)] if spec.style == "sequential" else []
        return sequential([*first, *layers.values()], name="net")
    x = keras.Input(shape, dtype=integers, name="main")
    if spec.inputs != "one":
        beside = keras.Input((SIDE,), name="side")
        x = (x, beside) if spec.inputs == "tuple" else {"main": x, "side": beside}
    return functional(x, _wire(spec, layers, x), name="net")


def own_layers(model: Any) -> list[Any]:
    """A model's layers that belong to single ranks."""
    return [layer for layer in getattr(model, "parts", ()) if "own" in layer.name]


def rate_of(spec: View) -> float:
    """The learning rate of a program's optimizer."""
    return RATES.get(spec.optimizer, 0.01) / (
        spec.batch if spec.reduction in ("sum", "none") else 1
    )


def _noisy(apply: Any, noise: float, gradients: Any, variables: Any = None) -> Any:
    """Apply gradients that may be 0 in one process, and a rounding error where ranks add them."""
    random = np.random.default_rng(int(noise * 1e9))

    def changed(gradient: Any) -> Any:
        if gradient is None or not hasattr(gradient, "shape") or hasattr(gradient, "indices"):
            return gradient
        return gradient + 0.1 * noise * random.normal(size=gradient.shape).astype(
            gradient.dtype.name
        )

    return apply([changed(gradient) for gradient in gradients], variables)


def _distributed(made: Any, model: Any, spec: View, side: Side, **chosen: Any) -> Any:
    """An optimizer, or the tape of a step, that averages gradients."""
    if spec.distributed != "plain":
        chosen[spec.distributed] = VALUES.get(spec.distributed, True)
    if spec.op == "sum":
        chosen["op"] = side.hvd.Sum
    if spec.compression != "none":
        chosen["compression"] = getattr(side.hvd.Compression, spec.compression)
    kind = "Optimizer" if hasattr(made, "apply") else "GradientTape"
    if own := own_layers(model):
        make = getattr(side.hvd, f"PartialDistributed{kind}")
        return make(made, local_layers=own, **chosen, **side.options)
    return getattr(side.hvd, f"Distributed{kind}")(made, **chosen, **side.options)


def _optimizer(model: Any, spec: View, side: Side, noise: float) -> Any:
    rate: Any = rate_of(spec)
    if spec.schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.8)
    name, options = spec.optimizer, dict[str, Any](name="optimizer")
    if "ema" in spec.option:
        options |= {"use_ema": True, "ema_momentum": 0.7}
        options["ema_overwrite_frequency"] = 2 if spec.option == "ema_overwrites" else None
    elif spec.option != "none":
        options[spec.option] = VALUES[spec.option]
    if name == "RMSprop" and spec.body != "embedding":  # there, it updates rows by themselves
        options["momentum"] = 0.5
    if name == "Momentum":
        name, options = "SGD", {**options, "momentum": 0.8}
    chosen: dict[str, Any] = {}
    if spec.backward_passes and side.hvd:
        chosen["backward_passes_per_step"] = spec.accumulation
        chosen["average_aggregated_gradients"] = True
    elif spec.accumulation > 1:
        options["gradient_accumulation_steps"] = spec.accumulation
    kind = {"Clipping": Clipping, "Own": Own}.get(name) or getattr(keras.optimizers, name)
    made = kind(rate, **options)
    if spec.multi:
        other = keras.optimizers.SGD(0.02, **options | {"momentum": 0.5, "name": "other"})
        of_paths = keras.optimizers.OptimizerMap(made, {"(.*/)?a/.*": other})
        made = keras.optimizers.MultiOptimizer(of_paths, name="several")
    if noise:
        made.apply = functools.partial(_noisy, made.apply, noise)
    if spec.loss_scale or spec.precision == "mixed_float16":
        scale = {"initial_scale": 16.0, "dynamic_growth_steps": 2, "name": "scale"}
        made = keras.optimizers.LossScaleOptimizer(made, **scale)
    if not side.hvd or spec.step == "tape":
        return made
    return _distributed(made, model, spec, side, **chosen)


def prepare(model: Any, spec: View, side: Side) -> None:
    """Gives a step of its own what it needs."""
    if spec.step == "tape" and side.hvd:
        model.tape = functools.partial(_distributed, model=model, spec=spec, side=side)
    model.divides = spec.step == "divides"
    if spec.step == "function":
        model.compute_loss = tf.function(type(model).compute_loss.__get__(model))
    if spec.step == "second":
        second = keras.optimizers.SGD(0.05, momentum=0.5, name="second")
        model.second = _distributed(second, model, spec, side) if side.hvd else second


def compiled(model: Any, spec: View, side: Side, noise: float = 0.0) -> Any:
    """Compile a model, and return it."""

    def each(make: Any) -> Any:
        of = {"one": make, "list": lambda: [make(), make()]}
        return of.get(spec.outputs, lambda: {"a": make(), "b": make()})()

    def loss() -> Any:
        if spec.is_function:
            return FUNCTIONS[spec.loss]
        cls, options = LOSSES[spec.loss]
        return cls(reduction="none" if spec.step == "divides" else spec.reduction, **options)

    def metrics() -> list[Any]:
        of = keras.metrics
        if spec.metrics == "whole":
            return [largest]
        if spec.has_classes:
            found = [of.SparseTopKCategoricalAccuracy(2), of.MeanIoU(CLASSES, sparse_y_pred=False)]
            return found if spec.metrics == "scores" else ["sparse_categorical_accuracy"]
        if spec.loss == "categorical":
            found = [of.F1Score(average="macro"), of.AUC(multi_label=True, from_logits=True)]
            return found if spec.metrics == "scores" else ["categorical_accuracy"]
        if spec.metrics == "scores":
            of_two = [of.AUC(), of.Precision(thresholds=0.3), of.BinaryIoU()]
            return [Overshoot(), *(of_two if spec.loss in ("binary", "dice") else [of.R2Score()])]
        return ["mae", of.RootMeanSquaredError()]

    shares = iter((0.3, 0.7))
    model.compile(
        _optimizer(model, spec, side, noise),
        each(loss),
        loss_weights=each(lambda: next(shares)) if spec.loss_weights else None,
        metrics=each(metrics) if spec.metrics not in ("none", "weighted") else None,
        weighted_metrics=each(metrics) if spec.metrics in ("weighted", "both") else None,
        steps_per_execution=spec.at_once,
        run_eagerly=spec.mode == "eager",
        jit_compile=spec.mode == "xla",
    )
    prepare(model, spec, side)
    if spec.optimizer == "ScheduleFreeAdamW" and not side.hvd and model.built:
        # Otherwise Keras builds it anew in each trace of a step.
        model.optimizer.build(model.trainable_variables)
    return model
