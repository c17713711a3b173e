"""What scripts write: losses, regularizers, metrics, initializers, layers and optimizers."""

from typing import Any

import keras
import numpy as np

from tests.programs.data import LENGTH

register = keras.saving.register_keras_serializable("programs")


def _squares(y: Any, predicted: Any) -> Any:
    return (keras.ops.cast(y, predicted.dtype) - predicted) ** 2


@register
def root(y: Any, predicted: Any) -> Any:
    """A loss that gives no row its own, as the next ones."""
    return keras.ops.sqrt(keras.ops.mean(_squares(y, predicted)) + 0.01)


@register
def flooded(y: Any, predicted: Any) -> Any:
    return abs(keras.ops.mean(_squares(y, predicted)) - 0.25)


@register
def capped(y: Any, predicted: Any) -> Any:
    squares = _squares(y, predicted)
    return squares / (1 + keras.ops.relu(keras.ops.max(squares) - 0.1))


@register
def marked(y: Any, predicted: Any) -> Any:
    """Of targets that a number marks, of which ranks have different numbers."""
    valid = keras.ops.cast(y > 0.1, predicted.dtype)
    return keras.ops.sum(_squares(y, predicted) * valid) / (keras.ops.sum(valid) + 1e-6)


@register
def spread(activities: Any) -> Any:
    """A regularizer of the activities of all rows, which Keras divides by their number."""
    rows = keras.ops.cast(keras.ops.shape(activities)[0], "float32")
    return 0.1 * rows * keras.ops.sqrt(keras.ops.mean(keras.ops.cast(activities, "float32") ** 2))


@register
def largest(y: Any, predicted: Any) -> Any:
    """A metric of all rows."""
    return keras.ops.max(keras.ops.cast(predicted, "float32"))


@register
class Overshoot(keras.metrics.Mean):
    """The mean excess of the predictions, a metric of one's own."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(keras.ops.relu(y_pred - y_true), sample_weight)


@register
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


@register
class Own(keras.optimizers.Optimizer):
    """An optimizer as in Keras's documentation."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient = keras.ops.convert_to_tensor(gradient)
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        self.assign_sub(variable, learning_rate * (gradient + 0.1 * total))


@register
class Positions(keras.layers.Layer):
    """Adds what it looks up of the places in a row, which are those of all rows."""

    def __init__(self, number: int, noise: float, **more: Any) -> None:
        super().__init__(**more)
        self.arguments = {"number": number, "noise": noise}
        self.table = keras.layers.Embedding(LENGTH, 3, Initial(number, noise))
        self.table.build()

    def call(self, words: Any) -> Any:
        return words + self.table(keras.ops.arange(LENGTH))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}


@register
class Clipping(keras.optimizers.SGD):
    """An optimizer that changes gradients before Keras sees them."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        def clipped(one: Any) -> Any:
            if one is None or hasattr(one, "indices"):
                return one
            norm = keras.ops.sqrt(keras.ops.sum(one * one))
            return one * keras.ops.minimum(1.0, 0.1 / (norm + 1e-6))

        super().apply([clipped(one) for one in grads], trainable_variables)


FUNCTIONS = {one.__name__: one for one in (root, flooded, capped, marked)}
