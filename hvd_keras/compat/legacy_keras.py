"""Distributed optimizers of tf_keras (``TF_USE_LEGACY_KERAS=1``).

Supports both families, ``tf_keras.optimizers.Optimizer`` and ``tf_keras.optimizers.legacy``. They
aggregate gradients before they clip them, and ``LossScaleOptimizer`` aggregates before it checks
for overflows, so an overflow on one rank is one on all ranks.

The legacy family also gets ``build`` and ``variables`` as other optimizers have, for the callbacks.
"""

from collections.abc import Iterable
from typing import Any

from hvd_keras._keras import keras
from hvd_keras.training import exchange, forgotten, reducer


def classes() -> tuple[type, ...]:
    """The classes of optimizers that ``DistributedOptimizer`` accepts."""
    return keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer


class Reducer(reducer.GradientReducer):
    """Reduces the gradients of an optimizer of tf_keras; lives in it as an attribute.

    Args:
        optimizer: of one of ``classes``, without a LossScaleOptimizer around it.
        name, options, groups: as in ``reducer.GradientReducer``.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        options: exchange.ExchangeOptions,
        groups: exchange.Groups,
    ) -> None:
        super().__init__(name, options, groups)
        self.optimizer = optimizer
        self.variables: list[Any] = []
        optimizer._hvd_reducer = self
        optimizer.apply_gradients = self.apply_gradients
        if isinstance(optimizer, keras.optimizers.legacy.Optimizer):
            optimizer._aggregate_gradients = self.aggregate_gradients
        else:
            optimizer.build = self.build
            optimizer.aggregate_gradients = self.aggregate_gradients

    def build(self, var_list: Any) -> None:
        """Replaces ``Optimizer.build``."""
        self.variables = list(var_list)
        type(self.optimizer).build(self.optimizer, var_list)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Replaces ``Optimizer.apply_gradients``, which every step calls."""
        pairs = list(grads_and_vars)
        if experimental_aggregate_gradients and not skip_gradients_aggregation and pairs:
            gradients, variables = zip(*pairs, strict=True)
            pairs = list(zip(self.reduce(gradients, variables), variables, strict=True))
        own = type(self.optimizer).apply_gradients
        token = forgotten.exchanged.set(True)
        try:
            return own(self.optimizer, pairs, name=name, experimental_aggregate_gradients=False)
        finally:
            forgotten.exchanged.reset(token)

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Replaces ``Optimizer.aggregate_gradients``, which LossScaleOptimizer calls.

        LossScaleOptimizer omits variables without a gradient on this rank. In the newer family,
        ``build`` has received all variables.
        """
        gradient = {exchange.variable_id(v): (g, v) for g, v in grads_and_vars}
        variables = [v for _, v in gradient.values()]
        if gradient.keys() <= {exchange.variable_id(v) for v in self.variables}:
            variables = self.variables
        mine = [gradient.get(exchange.variable_id(v), (None, v))[0] for v in variables]
        reduced = zip(self.reduce(mine, variables), variables, strict=True)
        return [(g, v) for g, v in reduced if g is not None]


class _CallableList(list[Any]):
    """A list that works as ``optimizer.variables`` and as ``optimizer.variables()``."""

    def __call__(self) -> list[Any]:
        return self


def add_build(_: Any) -> Any:
    """Returns a ``build`` for the legacy family, which has none.

    The class is patched because ``compile`` creates LossScaleOptimizers by itself.
    """

    def build(self: Any, var_list: Any) -> None:
        self._create_all_weights(list(var_list))
        self.variables = _CallableList(self.weights)

    return build
