"""The models of programs: layers, optimizers, losses."""

import functools
from typing import Any

import keras
import numpy as np

from tests.programs.data import CLASSES, LENGTH, SHAPES, SIDE, WORDS
from tests.programs.draw import View

RATES = {"SGD": 0.05, "Momentum": 0.02, "Adagrad": 0.05, "Adadelta": 0.5, "Ftrl": 0.05}
RATES |= {"Lion": 0.003}


@keras.saving.register_keras_serializable("programs")
def custom(y: Any, predicted: Any) -> Any:
    """A loss that gives no row its own."""
    error = keras.ops.cast(y, predicted.dtype) - predicted
    return keras.ops.sqrt(keras.ops.mean(error**2) + 0.01)


LOGITS = {"from_logits": True}
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mse": (keras.losses.MeanSquaredError, {}),
    "huber": (keras.losses.Huber, {"delta": 0.5}),
    "log_cosh": (keras.losses.LogCosh, {}),
    "mae": (keras.losses.MeanAbsoluteError, {}),
    "sparse": (keras.losses.SparseCategoricalCrossentropy, LOGITS),
    "probabilities": (keras.losses.SparseCategoricalCrossentropy, {}),
    "categorical": (keras.losses.CategoricalCrossentropy, LOGITS),
    "binary": (keras.losses.BinaryCrossentropy, {}),
    "focal": (keras.losses.BinaryFocalCrossentropy, LOGITS),
    "dice": (keras.losses.Dice, {}),
}
ACTIVATIONS = {"probabilities": "softmax", "binary": "sigmoid", "dice": "sigmoid"}
# Of options of optimizers; those not here are true.
VALUES = {"weight_decay": 0.02, "clipnorm": 0.1, "global_clipnorm": 0.2, "clipvalue": 0.03}
VALUES |= {"num_groups": 2, "gradient_predivide_factor": 2.0}


@keras.saving.register_keras_serializable("programs")
class Initial(keras.initializers.Initializer):
    """Weights by a number; ``noise`` changes each by about so much of itself."""

    def __init__(self, number: int, noise: float = 0.0) -> None:
        self.number, self.noise = number, noise

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        values = np.random.default_rng(self.number).uniform(-0.5, 0.5, shape)
        values *= 1 + self.noise * np.random.default_rng(int(self.noise * 1e9)).normal(size=shape)
        return keras.ops.convert_to_tensor(values, dtype)

    def get_config(self) -> dict[str, Any]:
        return {"number": self.number, "noise": self.noise}


def _layers(spec: View, number: int, noise: float) -> dict[str, Any]:
    """The layers of a model by name; ``number`` decides about their weights."""
    made: dict[str, Any] = {}

    def add(cls: Any, name: str, *args: Any, kernel: str = "kernel", **options: Any) -> None:
        if kernel:
            options[f"{kernel}_initializer"] = Initial(number + len(made), noise)
        made[name] = cls(*args, name=name, **options)

    of = keras.layers
    decay = {"kernel_regularizer": keras.regularizers.L2(0.01)} if spec.regularizer else {}
    if spec.has_table:
        mask = {"mask_zero": spec.is_sequence}
        add(of.Embedding, "table", WORDS, 3, kernel="embeddings", **mask)
        if not spec.is_sequence:
            add(of.GlobalAveragePooling1D, "mean", kernel="")
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
    if spec.inputs != "one":
        add(of.Dense, "beside", 2, activation="tanh")
    units = CLASSES if spec.loss in ("sparse", "probabilities", "categorical") else 1
    for name in ("a",) if spec.outputs == "one" else ("a", "b"):
        activation = ACTIVATIONS.get(spec.loss)
        add(of.Dense, name, units, activation=activation, dtype="float32")
    return made


def _wire(spec: View, layers: dict[str, Any], x: Any) -> Any:
    """The outputs of the layers."""
    side = None
    if spec.inputs != "one":
        x, side = x if spec.inputs == "tuple" else (x["main"], x["side"])
    for name, layer in layers.items():
        if name not in ("beside", "a", "b"):
            x = layer(x)
    if side is not None:
        x = keras.ops.concatenate([x, layers["beside"](side)], axis=-1)
    outputs = {name: layers[name](x) for name in ("a", "b") if name in layers}
    if spec.outputs == "dict":
        return outputs
    return list(outputs.values()) if spec.outputs == "list" else outputs["a"]


@keras.saving.register_keras_serializable("programs")
class Net(keras.Model):
    """A subclassed model."""

    def __init__(self, spec: dict[str, Any], number: int, noise: float, **more: Any) -> None:
        super().__init__(**more)
        self.arguments = {"spec": spec, "number": number, "noise": noise}
        self.view = View(spec)
        self.parts = list(_layers(self.view, number, noise).values())

    def call(self, x: Any) -> Any:
        return _wire(self.view, {layer.name: layer for layer in self.parts}, x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}


def build(spec: View, number: int, noise: float) -> Any:
    """A new model; ``number`` decides about its weights, which ``noise`` changes."""
    if spec.style == "subclassed":
        return Net(spec.spec, number, noise, name="net")
    layers = _layers(spec, number, noise)
    integers = "int32" if spec.has_table else None
    shape = (LENGTH,) if spec.has_table else SHAPES.get(spec.body, (5,))
    if spec.style in ("sequential", "unbuilt"):
        first = [keras.Input(shape, dtype=integers)] if spec.style == "sequential" else []
        return keras.Sequential([*first, *layers.values()], name="net")
    x = keras.Input(shape, dtype=integers, name="main")
    if spec.inputs != "one":
        side = keras.Input((SIDE,), name="side")
        x = (x, side) if spec.inputs == "tuple" else {"main": x, "side": side}
    return keras.Model(x, _wire(spec, layers, x), name="net")


def rate_of(spec: View) -> float:
    """The learning rate of a program's optimizer."""
    return RATES.get(spec.optimizer, 0.01) / (spec.batch if spec.reduction == "sum" else 1)


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


def _optimizer(spec: View, hvd: Any, noise: float) -> Any:
    rate: Any = rate_of(spec)
    if spec.schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.8)
    name, options = spec.optimizer, dict[str, Any](name="optimizer")
    if "ema" in spec.option:
        options |= {"use_ema": True, "ema_momentum": 0.7}
        options["ema_overwrite_frequency"] = 2 if spec.option == "ema_overwrites" else None
    elif spec.option != "none":
        options[spec.option] = VALUES[spec.option]
    if name == "Momentum":
        name, options = "SGD", {**options, "momentum": 0.8}
    of_hvd = spec.distributed
    chosen = {} if of_hvd == "plain" else {of_hvd: VALUES.get(of_hvd, True)}
    if spec.backward_passes and hvd:
        chosen["backward_passes_per_step"] = spec.accumulation
        chosen["average_aggregated_gradients"] = True
    elif spec.accumulation > 1:
        options["gradient_accumulation_steps"] = spec.accumulation
    made = getattr(keras.optimizers, name)(rate, **options)
    if noise:
        made.apply = functools.partial(_noisy, made.apply, noise)
    if spec.loss_scale or spec.precision == "mixed_float16":
        scale = {"initial_scale": 16.0, "dynamic_growth_steps": 2, "name": "scale"}
        made = keras.optimizers.LossScaleOptimizer(made, **scale)
    return hvd.DistributedOptimizer(made, **chosen) if hvd else made


def compiled(model: Any, spec: View, hvd: Any, noise: float = 0.0) -> Any:
    """Compile a model, and return it; ``hvd`` is None for one process without hvd_keras."""

    def each(make: Any) -> Any:
        of = {"one": make, "list": lambda: [make(), make()]}
        return of.get(spec.outputs, lambda: {"a": make(), "b": make()})()

    def loss() -> Any:
        if spec.loss == "custom":
            return custom
        cls, options = LOSSES[spec.loss]
        return cls(reduction=spec.reduction, **options)

    def metrics() -> list[Any]:
        if spec.loss in ("sparse", "probabilities"):
            return ["sparse_categorical_accuracy"]
        if spec.loss == "categorical":
            return ["categorical_accuracy"]
        return ["mae", keras.metrics.RootMeanSquaredError()]

    model.compile(
        _optimizer(spec, hvd, noise),
        each(loss),
        metrics=each(metrics) if spec.metrics in ("metrics", "both") else None,
        weighted_metrics=each(metrics) if spec.metrics in ("weighted", "both") else None,
        steps_per_execution=spec.at_once,
        run_eagerly=spec.mode == "eager",
        jit_compile=spec.mode == "xla",
    )
    if spec.optimizer == "ScheduleFreeAdamW" and not hvd and model.built:
        # Otherwise Keras builds it anew in each trace of a step.
        model.optimizer.build(model.trainable_variables)
    return model
